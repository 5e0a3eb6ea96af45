"""What the ranks of a tensor-parallel group do together: sums and gathers.

Every rank calls the same operations in the same order: nothing else keeps them together. Knows
neither models nor who decides what is computed. Between processes: `process_group.py`.
"""

from typing import Protocol

import torch

from gpu_ops import ops

Tensor = torch.Tensor


class FusedSum(Protocol):
    """`reduce_add_rms_norm_` in one kernel, of the rows that it takes."""

    def takes(self, x: Tensor) -> bool: ...

    def reduce_add_rms_norm_(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> Tensor: ...


class RankGroup(Protocol):
    """The ranks that hold a model together. Owned by the engine thread.

    local_size  ranks that share this machine's memory and processors, this one included
    fused       None where sums and norms are apart
    """

    rank: int
    size: int
    local_size: int

    @property
    def fused(self) -> FusedSum | None: ...

    def fuse_norms(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        """Makes `fused` for rows of `size` elements where the devices can. Blocks for all ranks."""
        ...

    def all_reduce_(self, x: Tensor) -> Tensor:
        """x becomes the sum of all ranks' x, the same bits on every rank; returns it.

        x  contiguous. On CUDA: on the current stream, without synchronising; may be captured.
        """
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """[size, *x.shape]: every rank's x, in the order of ranks. Otherwise as `all_reduce_`."""
        ...


def reduce_add_rms_norm_(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, group: RankGroup | None
) -> Tensor:
    """residual += the sum of all ranks' x, in place; returns rms_norm(residual, weight, eps).

    x, residual  [n, size], the residual the same on every rank; without a group, x is the sum
    weight       [size]
    Every rank gets the same bits. x is overwritten or left as it is. The sum is rounded once where
    it is fused, and before and after the residual is added where it is not.
    """
    if group is None:
        return ops.add_rms_norm_(x, residual, weight, eps)
    if group.fused is not None and group.fused.takes(x):
        return group.fused.reduce_add_rms_norm_(x, residual, weight, eps)
    return ops.add_rms_norm_(group.all_reduce_(x), residual, weight, eps)


def largest_of_all(logits: Tensor, first: int, group: RankGroup) -> Tensor:
    """[n] int32: ids of the largest logits of all ranks, the lowest among equals.

    logits  [n, m], of the ids from `first` on; a later rank's ids are higher
    """
    best, at = logits.max(-1)
    # float64 holds every id and every logit exactly, and one gather is quicker than two.
    both = torch.stack((best.double(), (at + first).double()))
    values, ids = group.all_gather(both).unbind(1)  # [ranks, n] each
    return ids.gather(0, values.argmax(0, keepdim=True))[0].to(torch.int32)
