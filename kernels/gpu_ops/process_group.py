"""The ranks of a group as processes: torch.distributed, by NCCL between GPUs and gloo between CPUs.

Imported where there are several ranks alone: torch.distributed brings torch's compiler along.
"""

import torch
import torch.distributed as dist

Tensor = torch.Tensor


class ProcessGroup:
    """All processes of torch's default group: NCCL between GPUs, gloo between CPUs.

    Owned by the engine thread.
    """

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def all_reduce_(self, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        gathered = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        dist.all_gather_into_tensor(gathered, x)
        return gathered.view(self.size, *x.shape)
