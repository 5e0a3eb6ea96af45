"""The words in which a request's rules about its logits travel. Loads no torch."""

import enum
from typing import Final

RULE_WORDS: Final = 4  # row, kind, token id, value


class Rule(enum.IntEnum):
    """Kinds of rules, in the order in which they are taken, and what `value` holds."""

    BEGIN = 0  # nothing; the row's earlier rules are gone
    ONLY_ALLOWED = 1  # nothing; every id is forbidden but those that follow
    ALLOWED = 2  # nothing
    BIAS = 3  # float32 bits
    EARLY = 4  # nothing; an id not to be drawn before the minimal length
    MIN_LENGTH = 5  # positions below this one are early
    IN_PROMPT = 6  # nothing
    MADE = 7  # how often the id is in the output
    REPETITION = 8  # float32 bits, as the next two
    PRESENCE = 9
    FREQUENCY = 10
