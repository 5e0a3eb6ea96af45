"""Matrix products of a decode step, with what comes before and after them fused in.

cuBLAS reads the weights only once the kernel before has ended; these do so while it runs, which
decides where a product takes some microseconds. For sizes that `takes` or `takes_many` refuses use
`ops.linear` and the small kernels.
"""

import functools
from dataclasses import dataclass
from typing import Final

import torch

from gpu_ops import cuda_streamed_linear
from gpu_ops.after import After
from gpu_ops.cuda_launch import Kernel, kernel, multiprocessors
from gpu_ops.cuda_tensor_map import tensor_map
from gpu_ops.unnormed import Unnormed

Tensor = torch.Tensor

# Where each is the fastest, measured on an H200 (perf/LOG.md).
MAX_ROWS: Final = 16  # of the products with fused norms
MAX_MANY_ROWS: Final = 256
_STREAMED_ELEMENTS: Final = 16 << 20  # of a weight whose blocks come in several turns
_ROWS_PER_BLOCK: Final = 16  # of the weight
_THREADS: Final = 256
_WARPS: Final = 8
_SHARED_BYTES: Final = 232_448


def takes(rows: int, weight: Tensor) -> bool:
    """Whether `rows` rows times `weight` [out, in] can run here."""
    if not 0 < rows <= MAX_ROWS:
        return False
    return _fits(rows, weight) or cuda_streamed_linear.takes(weight)


def _fits(rows: int, weight: Tensor) -> bool:
    """Whether a block's rows of the weight may lie in shared memory whole, a block or two long."""
    outputs, size = weight.shape
    return (
        weight.dtype == torch.bfloat16
        and weight.numel() < _STREAMED_ELEMENTS
        and size % 32 == 0
        and outputs % _ROWS_PER_BLOCK == 0
        and _shared_bytes(size, _columns(rows)) <= _SHARED_BYTES
    )


def norm_linear(x: Tensor, norm: Tensor, eps: float, weight: Tensor) -> Tensor:
    """rms_norm(x, norm, eps) weightᵀ, [n, out]."""
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
    _launch(x, norm, eps, weight, out, After.STORE)
    return out


def norm_linear_silu_mul(x: Tensor, norm: Tensor, eps: float, weight: Tensor) -> Tensor:
    """silu_mul(rms_norm(x, norm, eps) weightᵀ), [n, out / 2]; the weight is gate, then up."""
    out = torch.empty((x.shape[0], weight.shape[0] // 2), dtype=x.dtype, device=x.device)
    _launch(x, norm, eps, weight, out, After.SILU_MUL)
    return out


def linear_add_(x: Tensor, weight: Tensor, residual: Tensor) -> None:
    """residual [n, out] += x weightᵀ, the product rounded before it is added."""
    _launch(x, None, 0.0, weight, residual, After.ADD)


def _columns(rows: int) -> int:
    """Groups of eight rows of x, a power of two: fewer programs."""
    return 1 << ((rows - 1) // 8).bit_length()


def _shared_bytes(size: int, columns: int) -> int:
    row_stride = size * 2 + 64
    return _ROWS_PER_BLOCK * row_stride + 16 + _WARPS * columns * (8 * 4 + 32 * 16)


def _launch(
    x: Tensor, norm: Tensor | None, eps: float, weight: Tensor, out: Tensor, after: After
) -> None:
    (rows, size), outputs = x.shape, weight.shape[0]
    if not _fits(rows, weight):
        cuda_streamed_linear.launch(x, norm, eps, weight, out, after)
        return
    _kernel(size, _columns(rows), norm is not None, after).launch(
        (outputs // _ROWS_PER_BLOCK, 1), _THREADS,
        x.data_ptr(), weight.data_ptr(), 0 if norm is None else norm.data_ptr(), out.data_ptr(),
        rows, outputs, eps, shared_bytes=_shared_bytes(size, _columns(rows)),
    )  # fmt: skip


@functools.cache
def _kernel(size: int, columns: int, normed: bool, after: After) -> Kernel:
    macros = {"SIZE": size, "COLUMNS": columns, "NORM": int(normed), "AFTER": int(after)}
    run = kernel("few_rows_linear.cu", "few_rows_linear", "PPPPiif", macros)
    return run.allow_shared(_shared_bytes(size, columns))


# --- more rows: products of warpgroups

_BLOCK_ROWS: Final = 64  # of the weight, as in csrc/decode_linear.cu
_BLOCK_K: Final = 64
_COLUMN_CHOICES: Final = (32, 64, 96, 128, 160, 192)  # wider ones are slower than two of these
_MAX_SPLITS: Final = 4  # clusters of eight take longer to form (perf/LOG.md)
_MAX_ELEMENTS: Final = 16 << 20  # of a weight: cuBLAS is as good where reading it takes long
_MANY_THREADS: Final = 160
_OTHER_BYTES: Final = 1024 + 16 * 16 + 4 * 192  # what aligns the ring, barriers, scales


def takes_many(rows: int, weight: Tensor) -> bool:
    """Whether `rows` rows times `weight` [out, in] can run here, and should."""
    outputs, size = weight.shape
    return (
        0 < rows <= MAX_MANY_ROWS
        and weight.dtype == torch.bfloat16
        and weight.numel() <= _MAX_ELEMENTS
        and size % _BLOCK_K == 0
        and outputs % _BLOCK_ROWS == 0
        and torch.cuda.get_device_capability(weight.device) == (9, 0)
    )


@dataclass(frozen=True, slots=True)
class ManyTuning:
    """How a product is cut up; `many_tuning` chooses."""

    columns: int  # rows of x to a block
    splits: int  # blocks that share k out
    stages: int


def many_linear(x: Tensor | Unnormed, weight: Tensor, tuning: ManyTuning | None = None) -> Tensor:
    """x weightᵀ, [n, out]; of rows that are not normed yet, the product of the normed ones."""
    return _launch_many(x, weight, After.STORE, tuning)


def many_linear_silu_mul(
    x: Tensor | Unnormed, weight: Tensor, tuning: ManyTuning | None = None
) -> Tensor:
    """silu_mul of `many_linear`, [n, out / 2]; the weight is gate, then up."""
    return _launch_many(x, weight, After.SILU_MUL, tuning)


def many_linear_add_(
    x: Tensor,
    weight: Tensor,
    residual: Tensor,
    norm: Tensor,
    eps: float,
    tuning: ManyTuning | None = None,
) -> Unnormed:
    """residual [n, out] += x weightᵀ, the product rounded before; returns its norm, half done."""
    rows, outputs = residual.shape
    squares = torch.empty((outputs // _BLOCK_ROWS, rows), device=x.device)
    out = _launch_many(x, weight, After.ADD, tuning, (residual, norm, squares))
    return Unnormed(out, squares, eps)


def _launch_many(
    x: Tensor | Unnormed,
    weight: Tensor,
    after: After,
    tuning: ManyTuning | None,
    added: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Tensor:
    """`added`: the residual, the norm after it, and where its squares go."""
    normed = isinstance(x, Unnormed)
    source, squares, eps = (x.x, x.squares, x.eps) if isinstance(x, Unnormed) else (x, None, 0.0)
    (rows, size), outputs = source.shape, weight.shape[0]
    out = source.new_empty((rows, outputs // 2 if after == After.SILU_MUL else outputs))
    tuning = tuning or many_tuning(rows, outputs, size, multiprocessors(weight.device))
    columns, splits = tuning.columns, tuning.splits
    shared_bytes = tuning.stages * _stage_bytes(columns) + 1024
    pointers = (0, 0, 0) if added is None else tuple(part.data_ptr() for part in added)
    _many_kernel(tuning, normed, after, shared_bytes).launch(
        (outputs // _BLOCK_ROWS * splits, -(-rows // columns)), _MANY_THREADS,
        _weight_map(weight, after == After.SILU_MUL),
        tensor_map(source, (size, rows), (source.stride(0),), (_BLOCK_K, columns)),
        out.data_ptr(), rows, out.shape[1], size // (_BLOCK_K * splits),
        0 if squares is None else squares.data_ptr(), 0 if squares is None else len(squares),
        float(size), eps, *pointers,
        shared_bytes=shared_bytes, cluster=splits,
    )  # fmt: skip
    return out


@functools.cache
def many_tuning(rows: int, outputs: int, size: int, resident: int) -> ManyTuning:
    """For a device of `resident` multiprocessors."""
    columns = _many_columns(rows)
    row_blocks = outputs // _BLOCK_ROWS
    blocks = row_blocks * -(-rows // columns)
    splits = _splits(blocks, size, resident)
    per_multiprocessor = 1 if blocks * splits <= resident else 2
    return ManyTuning(columns, splits, _many_stages(columns, per_multiprocessor))


def _weight_map(weight: Tensor, silu_mul: bool) -> bytes:
    """Rows of the weight as [outer, 2, 8]: natural order, or 8 of the gate and the same of up."""
    outputs, size = weight.shape
    inner, outer = (outputs // 2 * size, 8 * size) if silu_mul else (8 * size, 16 * size)
    sizes = (size, 8, 2, outputs // 16)
    return tensor_map(weight, sizes, (size, inner, outer), (_BLOCK_K, 8, 2, 4))


def _many_columns(rows: int) -> int:
    """Rows of x to a block: as few blocks as can be, filled as well as can be."""
    blocks = -(-rows // _COLUMN_CHOICES[-1])
    return next(columns for columns in _COLUMN_CHOICES if columns * blocks >= rows)


def _splits(blocks: int, size: int, resident: int) -> int:
    """Blocks that share k out: a power of two that keeps half the device busy."""
    splits = 1
    while (
        splits < _MAX_SPLITS
        and blocks * splits * 4 <= resident
        and size % (_BLOCK_K * splits * 2) == 0
    ):
        splits *= 2
    return splits


def _stage_bytes(columns: int) -> int:
    return (_BLOCK_ROWS + columns) * _BLOCK_K * 2


def _many_stages(columns: int, per_multiprocessor: int) -> int:
    budget = _SHARED_BYTES // per_multiprocessor - _OTHER_BYTES - 1024
    return min(8, budget // _stage_bytes(columns))


@functools.cache
def _many_kernel(tuning: ManyTuning, normed: bool, after: After, shared_bytes: int) -> Kernel:
    macros = {
        "COLUMNS": tuning.columns,
        "SPLITS": tuning.splits,
        "STAGES": tuning.stages,
        "NORMED": int(normed),
        "AFTER": int(after),
    }
    run = kernel("decode_linear.cu", "decode_linear", "TTPiiiPiffPPP", macros, own_arch=True)
    return run.allow_shared(shared_bytes)
