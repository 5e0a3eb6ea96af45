"""The ranks' sums fused with residual and norm: partial sums written into the peers' memory.

csrc/reduce_norm.cu has the protocol and why it holds. For the few rows of a decode step: of many,
NCCL moves less. Between GPUs that reach each other's memory, through torch's symmetric memory;
NVLink multicast is never used.

A rank that died leaves the others' kernels waiting. That keeps no process from ending: its memory
and kernels go with it, as with NCCL's, so whoever watches the ranks ends them as ever. Where nobody
does, a kernel gives up after `PATIENCE_S`: a launch failure, which the process cannot survive.
"""

import functools
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist

from gpu_ops.cuda_launch import Kernel, kernel, multiprocessors
from gpu_ops.cuda_ops import norm_shape

Tensor = torch.Tensor
Made = TypeVar("Made")

MAX_ROWS: Final = 256
MAX_RANKS: Final = 8
PATIENCE_S: Final = 120  # more than a rank may be late by: it may be compiling a kernel
_BLOCKS_PER_MULTIPROCESSOR: Final = 2  # as in csrc/reduce_norm.cu
# A rank sends its rows to every other; NCCL sends less of many rows. Reckoned: they are as quick at
# this with eight ranks.
_MOST_SENT_BYTES: Final = 8 << 20
_MAX_SIZE: Final = 8192  # more elements a row need more registers than two blocks have
_DTYPES: Final = (torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True)
class Memory:
    """The bytes of a rank's memory, the same on every rank."""

    ranks: int
    size: int
    element_bytes: int

    @property
    def header_bytes(self) -> int:
        """Rounds and flags, which begin as zeros."""
        return MAX_ROWS * (1 + self.ranks) * 4

    @property
    def bytes(self) -> int:
        return self.header_bytes + 2 * MAX_ROWS * self.ranks * self.size * self.element_bytes


class SymmetricRows:
    """Sums rows of one size over all ranks. Owned by the engine thread.

    memory  uint8, this rank's; its header is zero on every rank before any of them sums
    peers   addresses of all ranks' memories, as this rank sees them
    held    what keeps those addresses valid
    """

    def __init__(
        self, rank: int, size: int, dtype: torch.dtype, memory: Tensor, peers: list[int], held: Any
    ) -> None:
        self._rank, self._size, self._dtype = rank, size, dtype
        self._held = memory, held  # peers write into it
        self._peers = struct.pack("8Q", *peers, *[0] * (MAX_RANKS - len(peers)))
        self._threads, _ = norm_shape(size)
        self._run = _kernel(len(peers), size, dtype.itemsize)
        self.max_rows = min(
            MAX_ROWS,
            # Blocks wait for the peers' blocks, so all must be resident.
            _BLOCKS_PER_MULTIPROCESSOR * multiprocessors(memory.device),
            _MOST_SENT_BYTES // ((len(peers) - 1) * size * dtype.itemsize),
        )

    def takes(self, x: Tensor) -> bool:
        """Whether `reduce_add_rms_norm_` can sum x; the same on every rank."""
        return x.dtype == self._dtype and x.shape[1] == self._size and x.shape[0] <= self.max_rows

    def reduce_add_rms_norm_(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> Tensor:
        """As `collectives.reduce_add_rms_norm_`, for what `takes` takes."""
        out = torch.empty_like(residual)
        if len(x):
            pointers = x.data_ptr(), residual.data_ptr(), weight.data_ptr(), out.data_ptr()
            self._run.launch((len(x), 1), self._threads, self._peers, *pointers, self._rank, eps)
        return out


@functools.cache
def _kernel(ranks: int, size: int, element_bytes: int) -> Kernel:
    threads, vectors = norm_shape(size)
    macros = {
        "RANKS": ranks, "SIZE": size, "ELEMENT_BYTES": element_bytes, "THREADS": threads,
        "VECTORS": vectors, "MAX_ROWS": MAX_ROWS, "PATIENCE_S": PATIENCE_S,
    }  # fmt: skip
    return kernel("reduce_norm.cu", "reduce_norm", "APPPPif", macros)


def make_symmetric_rows(
    size: int, dtype: torch.dtype, device: torch.device
) -> tuple[SymmetricRows | None, str]:
    """For rows of `size` elements, between all ranks' GPUs; or None and why.

    All ranks are of one machine. Every rank calls it, and gets one or gets none as all others do;
    blocks until all have.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    # Agreed on first: nobody may wait in a rendezvous for one that does not come.
    reason = _first_of_all(reason_against(size, dtype, device, ranks))
    if reason:
        return None, reason
    memory = Memory(ranks, size, dtype.itemsize)
    own, reason = _attempt(lambda: _allocate(memory, device))
    reason = _first_of_all(reason)
    if own is None or reason:
        return None, reason
    rows, reason = _attempt(lambda: _exchange(rank, size, dtype, own))
    reason = _first_of_all(reason)
    return (None, reason) if reason else (rows, "")


def reason_against(size: int, dtype: torch.dtype, device: torch.device, ranks: int) -> str:
    """Why sums of such rows cannot be fused, as far as this rank knows; empty if they can."""
    if not 2 <= ranks <= MAX_RANKS:
        return f"{ranks} ranks, of which 2 to {MAX_RANKS} are taken"
    if dtype not in _DTYPES or size % 8 or not 0 < size <= _MAX_SIZE:
        return f"rows of {size} x {str(dtype).removeprefix('torch.')} are not taken"
    if torch.cuda.get_device_capability(device) < (9, 0):
        return "the device is older than sm_90"
    peers = [other for other in range(ranks) if other != device.index]
    if torch.cuda.device_count() < ranks or not all(
        torch.cuda.can_device_access_peer(device, other) for other in peers
    ):
        return f"{device} does not reach its peers' memory"
    return ""


def _first_of_all(reason: str) -> str:
    """The first rank's that has one. Blocks until every rank has called it."""
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, reason)
    return next((str(one) for one in told if one), "")


def _attempt(make: Callable[[], Made]) -> tuple[Made | None, str]:
    """What it makes, or None and why not: whatever it is, NCCL can do without."""
    try:
        return make(), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {error}".splitlines()[0]


def _allocate(memory: Memory, device: torch.device) -> Tensor:
    # A heavy module, and an optional one: torch calls it alpha.
    import torch.distributed._symmetric_memory as symmetric_memory

    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    own = symmetric_memory.empty(memory.bytes, dtype=torch.uint8, device=device)
    own[: memory.header_bytes].zero_()
    torch.cuda.synchronize(device)  # zero before any peer can know where it is
    return own


def _exchange(rank: int, size: int, dtype: torch.dtype, own: Tensor) -> SymmetricRows:
    """Blocks until all ranks have called it."""
    import torch.distributed._symmetric_memory as symmetric_memory

    group = dist.group.WORLD
    assert group is not None
    handle = symmetric_memory.rendezvous(own, group)
    offset = own.data_ptr() - handle.buffer_ptrs[rank]  # in torch's own allocation
    peers = [start + offset for start in handle.buffer_ptrs]
    return SymmetricRows(rank, size, dtype, own, peers, handle)
