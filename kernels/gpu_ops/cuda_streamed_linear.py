"""Products of few rows with large weights: csrc/streamed_linear.cu.

Knows how such a product is cut up, and no caller: `cuda_linear` says what runs here.
"""

import functools
from dataclasses import dataclass
from typing import Final

import torch

from gpu_ops.after import After
from gpu_ops.cuda_launch import Kernel, kernel, multiprocessors
from gpu_ops.cuda_tensor_map import tensor_map

Tensor = torch.Tensor

MAX_ROWS: Final = 16
_BOX_K: Final = 64
_GROUP: Final = 8  # rows of the weight
_MAX_GROUPS: Final = 62  # of a block: its sums stay in registers
_MAX_COPY_GROUPS: Final = 32  # a tensor map's box has at most 256 rows
_THREADS: Final = 288
_RING_BYTES: Final = 232_448 - 1024 - 1024  # but for alignment, barriers and squares
_WANTED_STAGE_BYTES: Final = 20_000  # so many bytes in a copy's rows, while many stages fit
_MAX_STAGES: Final = 12


@dataclass(frozen=True, slots=True)
class StreamTuning:
    """How a product is cut up; `stream_tuning` chooses."""

    groups: int  # of eight rows of the weight to a block; for silu_mul even: half gate, half up
    boxes: int  # of 64 k to a stage: 1, 2 or 4
    stages: int


def takes(weight: Tensor) -> bool:
    """Whether up to `MAX_ROWS` rows times this weight [out, in] can run here."""
    outputs, size = weight.shape
    return (
        weight.dtype == torch.bfloat16
        and size % _BOX_K == 0
        and outputs % (2 * _GROUP) == 0
        and _groups(outputs // _GROUP, multiprocessors(weight.device)) <= _MAX_GROUPS
        and torch.cuda.get_device_capability(weight.device) >= (9, 0)
    )


@functools.cache
def stream_tuning(
    rows: int, outputs: int, size: int, resident: int, silu_mul: bool
) -> StreamTuning:
    """For a device of `resident` multiprocessors, one block each."""
    if silu_mul:
        groups = 2 * _groups(outputs // (2 * _GROUP), resident)
    else:
        groups = _groups(outputs // _GROUP, resident)
        groups += groups % _copies(groups, silu_mul)
    boxes = next(
        n
        for n in (1, 2, 4)
        if n == 4
        or size % (2 * n * _BOX_K)
        or _stage_bytes(groups, n, _columns(rows)) >= _WANTED_STAGE_BYTES
    )
    return StreamTuning(groups, boxes, stages_of(groups, boxes, rows))


def stages_of(groups: int, boxes: int, rows: int) -> int:
    """As many as fit."""
    return min(_MAX_STAGES, _RING_BYTES // _stage_bytes(groups, boxes, _columns(rows)))


def launch(
    x: Tensor,
    norm: Tensor | None,
    eps: float,
    weight: Tensor,
    out: Tensor,
    after: After,
    tuning: StreamTuning | None = None,
) -> None:
    """out [n, width] becomes, or for ADD grows by, the product of x, normed if there is a norm."""
    (rows, size), outputs = x.shape, weight.shape[0]
    assert 0 < rows <= MAX_ROWS
    silu_mul = after == After.SILU_MUL
    resident = multiprocessors(weight.device)
    tuning = tuning or stream_tuning(rows, outputs, size, resident, silu_mul)
    columns, copies = _columns(rows), _copies(tuning.groups, silu_mul)
    copy_rows = tuning.groups // copies * _GROUP
    owned = tuning.groups * _GROUP // (2 if silu_mul else 1)
    shared_bytes = tuning.stages * _stage_bytes(tuning.groups, tuning.boxes, columns) + 1024
    _kernel(tuning, columns, copies, norm is not None, after, shared_bytes).launch(
        (-(-out.shape[1] // owned), 1), _THREADS,
        tensor_map(weight, (size, outputs), (size,), (_BOX_K, copy_rows)),
        tensor_map(x, (size, rows), (x.stride(0),), (_BOX_K, columns * _GROUP)),
        0 if norm is None else norm.data_ptr(), out.data_ptr(), rows, outputs,
        size // (_BOX_K * tuning.boxes), eps, shared_bytes=shared_bytes,
    )  # fmt: skip


def _groups(groups: int, resident: int) -> int:
    return -(-groups // resident)


def _copies(groups: int, silu_mul: bool) -> int:
    return 2 if silu_mul or groups > _MAX_COPY_GROUPS else 1


def _columns(rows: int) -> int:
    return 1 if rows <= _GROUP else 2


def _stage_bytes(groups: int, boxes: int, columns: int) -> int:
    """W, x and the norm."""
    return boxes * ((groups + columns) * _GROUP + 1) * _BOX_K * 2


@functools.cache
def _kernel(
    tuning: StreamTuning, columns: int, copies: int, normed: bool, after: After, shared_bytes: int
) -> Kernel:
    macros = macros_of(tuning, columns, copies, normed, after)
    run = kernel("streamed_linear.cu", "streamed_linear", "TTPPiiif", macros)
    return run.allow_shared(shared_bytes)


def macros_of(
    tuning: StreamTuning, columns: int, copies: int, normed: bool, after: After
) -> dict[str, int]:
    """What csrc/streamed_linear.cu is compiled with."""
    return {
        "GROUPS": tuning.groups,
        "BOXES": tuning.boxes,
        "STAGES": tuning.stages,
        "COLUMNS": columns,
        "COPIES": copies,
        "NORM": int(normed),
        "AFTER": int(after),
    }
