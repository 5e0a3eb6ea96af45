"""What the ranks of a tensor-parallel group do together: sums and gathers.

Every rank calls the same operations in the same order: nothing else keeps them together. Knows
neither models nor who decides what is computed. Between processes: `process_group.py`.
"""

from typing import Protocol

import torch

Tensor = torch.Tensor


class RankGroup(Protocol):
    """The ranks that hold a model together. Owned by the engine thread."""

    rank: int
    size: int

    def all_reduce_(self, x: Tensor) -> Tensor:
        """x becomes the sum of all ranks' x, the same bits on every rank; returns it.

        x  contiguous. On CUDA: on the current stream, without synchronising; may be captured.
        """
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """[size, *x.shape]: every rank's x, in the order of ranks. Otherwise as `all_reduce_`."""
        ...


def all_reduce_(x: Tensor, group: RankGroup | None) -> Tensor:
    """As `RankGroup.all_reduce_`; without a group, x as it is."""
    return x if group is None else group.all_reduce_(x)


def largest_of_all(logits: Tensor, first: int, group: RankGroup) -> Tensor:
    """[n] int32: ids of the largest logits of all ranks, the lowest among equals.

    logits  [n, m], of the ids from `first` on; a later rank's ids are higher
    """
    best, at = logits.max(-1)
    # float64 holds every id and every logit exactly, and one gather is quicker than two.
    both = torch.stack((best.double(), (at + first).double()))
    values, ids = group.all_gather(both).unbind(1)  # [ranks, n] each
    return ids.gather(0, values.argmax(0, keepdim=True))[0].to(torch.int32)
