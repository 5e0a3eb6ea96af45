"""A ring of descriptors in shared memory: what `runtime.ranks.links` is measured against.

Slots of one file in /dev/shm, each with a sequence number that is written last. Readers look at it
again and again, then sleep for longer and longer. It has no way to say that a reader is gone.

Assumes that stores become visible in order, as on x86.
"""

import mmap
import time
from pathlib import Path
from typing import Final

import numpy as np

from engine.descriptor import H_WORDS
from engine.request import Int32Array

SLOTS: Final = 8
WORDS: Final = 1 << 16
_SPINS: Final = 2000
_LONGEST_SLEEP_S: Final = 500e-6


class SharedRing:
    """One end of it. Owned by one thread."""

    def __init__(self, path: Path, *, create: bool) -> None:
        size = SLOTS * (WORDS + 16) * 4
        with path.open("w+b" if create else "r+b") as file:
            if create:
                file.truncate(size)
            self._memory = mmap.mmap(file.fileno(), size)
        self._slots = np.frombuffer(self._memory, np.int32).reshape(SLOTS, WORDS + 16)
        self._turn = 0

    def send(self, block: Int32Array) -> None:
        slot = self._slots[self._turn % SLOTS]
        slot[16 : 16 + block.size] = block
        self._turn += 1
        slot[0] = self._turn

    def receive(self) -> Int32Array:
        slot, turn, looks = self._slots[self._turn % SLOTS], self._turn + 1, 0
        while slot[0] != turn:
            looks += 1
            if looks > _SPINS:
                time.sleep(min(_LONGEST_SLEEP_S, 20e-6 * (looks - _SPINS)))
        self._turn = turn
        block: Int32Array = slot[16 : 16 + int(slot[16 + H_WORDS])].copy()
        return block
