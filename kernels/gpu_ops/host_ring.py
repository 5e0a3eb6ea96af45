"""What a host and the decode steps on its device pass each other without copies.

A ring in pinned memory of the host, which the device reads and writes itself. Launch l of a decode
step, in a graph or not, has place l % PLACES: its first kernel (csrc/apply.cu) applies the changes
that the host has left there and counts the launch; its last (csrc/sample.cu) writes the ids that it
drew there. The device counts for itself, so that one graph serves every launch; the host counts
along.

What must stay true
- Every decode step, captured or eager, has both kernels, and nothing else counts.
- Each launch is announced with `leave`, before it is made: a launch makes what the host has written
  before it visible to the device.
- `leave` is called for launch l only once launch l - PLACES is over and its ids have been read:
  until then the device may read the changes and write the ids. `engine.staging.ResultRing` sees to
  it: no step begins before the one PLACES before it was collected.
- Ids are read once their launch is over. Each has its launch's number beside it, so that a count
  which has gone astray is an error and no wrong token.
"""

from collections.abc import Callable
from types import MappingProxyType
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

Tensor = torch.Tensor
Int32Array = NDArray[np.int32]

PLACES: Final = 4  # launches: two in flight, one being prepared, one to spare
COUNT_MASK: Final = 2**31 - 1  # numbers of launches begin again after it
CHANGE_WORDS: Final = 1024  # of a place; the kernel reads all of them at once, 4 by each thread
RING_MACROS: Final = MappingProxyType(
    {"PLACES": PLACES, "COUNT_MASK": COUNT_MASK, "CHANGE_WORDS": CHANGE_WORDS}
)


class HostRing:
    """The ring of one device's decode steps. Owned by the engine thread.

    changes   [PLACES, CHANGE_WORDS] int32, pinned: a descriptor without the parts of prompts
    ids       [PLACES, rows, 2] int32, pinned: ids, each with the number of its launch
    launches  [1] int32 on the device: launches that have begun
    """

    def __init__(
        self, pinned: Callable[[int], Tensor], rows: int, device: torch.device, none: Int32Array
    ) -> None:
        """
        pinned  makes [words] int32 of pinned memory
        rows    most of a step
        none    the words that change nothing
        """
        self.changes = pinned(PLACES * CHANGE_WORDS).view(PLACES, CHANGE_WORDS)
        self.ids = pinned(PLACES * rows * 2).view(PLACES, rows, 2)
        self.launches = torch.zeros(1, dtype=torch.int32, device=device)
        self._changes: Int32Array = self.changes.numpy()
        self._ids: Int32Array = self.ids.numpy()
        self._changes[:, : len(none)] = none
        self._ids[:] = -1
        self._none = none
        self._announced = 0

    def leave(self, changes: Int32Array | None) -> int:
        """Announces the next launch, with words of changes or none; returns its number."""
        launch = self._announced
        changes = self._none if changes is None else changes
        self._changes[launch % PLACES, : len(changes)] = changes
        self._announced = launch + 1 & COUNT_MASK
        return launch

    def read(self, launch: int, count: int) -> Int32Array:
        """[count] int32, a copy: the launch's first ids. The launch is over.

        Raises RuntimeError where they are another's.
        """
        place = self._ids[launch % PLACES, :count]
        ids: Int32Array = place[:, 0]
        numbers: Int32Array = place[:, 1]
        if (numbers != launch).any():
            raise RuntimeError(f"ids of launch {launch} are those of {set(numbers.tolist())}")
        return ids.copy()

    def count_on(self) -> None:
        """After launches that nobody announced, none of which had changes. Synchronises."""
        self._announced = int(self.launches[0])
