"""The ranks of a group as processes: torch.distributed, by NCCL between GPUs and gloo between CPUs.

Imported where there are several ranks alone: torch.distributed brings torch's compiler along.
"""

import logging
import os

import torch
import torch.distributed as dist

from gpu_ops.collectives import FusedSum

Tensor = torch.Tensor

log = logging.getLogger(__name__)


class ProcessGroup:
    """All processes of torch's default group: NCCL between GPUs, gloo between CPUs.

    Owned by the engine thread.
    """

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.local_size = int(os.environ.get("LOCAL_WORLD_SIZE", self.size))  # torchrun's
        self.fused: FusedSum | None = None

    def fuse_norms(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        reason = f"the ranks are on {device.type}"
        if self.local_size != self.size:
            reason = "the ranks are on several machines"
        elif device.type == "cuda":
            # Only where there is a device: it brings the compiler of kernels along.
            from gpu_ops.symmetric_rows import make_symmetric_rows

            self.fused, reason = make_symmetric_rows(size, dtype, device)
        if self.rank == 0 and self.fused is None:
            level = logging.WARNING if device.type == "cuda" else logging.INFO
            log.log(level, "the ranks' sums are not fused with norms: %s", reason)

    def all_reduce_(self, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        gathered = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        dist.all_gather_into_tensor(gathered, x)
        return gathered.view(self.size, *x.shape)
