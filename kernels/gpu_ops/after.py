"""What a product of a decode step does with its result; the numbers are those of csrc/."""

from enum import IntEnum


class After(IntEnum):
    STORE = 0
    ADD = 1
    SILU_MUL = 2
