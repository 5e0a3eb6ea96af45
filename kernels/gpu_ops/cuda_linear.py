"""Matrix products of few rows with their neighbours fused in: the decode step of few sequences.

There cuBLAS reads the weights only once the kernel before has ended; these do so while it runs.
For more rows than MAX_ROWS, or sizes that `takes` refuses, use `ops.linear` and the small kernels.
"""

import functools
from enum import IntEnum
from typing import Final

import torch

from gpu_ops.cuda_launch import Kernel, kernel

Tensor = torch.Tensor

MAX_ROWS: Final = 32
_ROWS_PER_BLOCK: Final = 16  # of the weight
_THREADS: Final = 256
_WARPS: Final = 8
_SHARED_BYTES: Final = 232_448


class _After(IntEnum):
    STORE = 0
    ADD = 1
    SILU_MUL = 2


def takes(rows: int, weight: Tensor) -> bool:
    """Whether `rows` rows times `weight` [out, in] can run here."""
    outputs, size = weight.shape
    return (
        0 < rows <= MAX_ROWS
        and weight.dtype == torch.bfloat16
        and size % 32 == 0
        and outputs % _ROWS_PER_BLOCK == 0
        and _shared_bytes(size, _columns(rows)) <= _SHARED_BYTES
    )


def norm_linear(x: Tensor, norm: Tensor, eps: float, weight: Tensor) -> Tensor:
    """rms_norm(x, norm, eps) weightᵀ, [n, out]."""
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
    _launch(x, norm, eps, weight, out, _After.STORE)
    return out


def norm_linear_silu_mul(x: Tensor, norm: Tensor, eps: float, weight: Tensor) -> Tensor:
    """silu_mul(rms_norm(x, norm, eps) weightᵀ), [n, out / 2]; the weight is gate, then up."""
    out = torch.empty((x.shape[0], weight.shape[0] // 2), dtype=x.dtype, device=x.device)
    _launch(x, norm, eps, weight, out, _After.SILU_MUL)
    return out


def linear_add_(x: Tensor, weight: Tensor, residual: Tensor) -> None:
    """residual [n, out] += x weightᵀ, the product rounded before it is added."""
    _launch(x, None, 0.0, weight, residual, _After.ADD)


def _columns(rows: int) -> int:
    """Groups of eight rows of x, a power of two: fewer programs."""
    return 1 << ((rows - 1) // 8).bit_length()


def _shared_bytes(size: int, columns: int) -> int:
    row_stride = size * 2 + 64
    return _ROWS_PER_BLOCK * row_stride + 16 + _WARPS * columns * (8 * 4 + 32 * 16)


def _launch(
    x: Tensor, norm: Tensor | None, eps: float, weight: Tensor, out: Tensor, after: _After
) -> None:
    (rows, size), outputs = x.shape, weight.shape[0]
    _kernel(size, _columns(rows), norm is not None, after).launch(
        (outputs // _ROWS_PER_BLOCK, 1), _THREADS,
        x.data_ptr(), weight.data_ptr(), 0 if norm is None else norm.data_ptr(), out.data_ptr(),
        rows, outputs, eps, shared_bytes=_shared_bytes(size, _columns(rows)),
    )  # fmt: skip


@functools.cache
def _kernel(size: int, columns: int, normed: bool, after: _After) -> Kernel:
    macros = {"SIZE": size, "COLUMNS": columns, "NORM": int(normed), "AFTER": int(after)}
    run = kernel("few_rows_linear.cu", "few_rows_linear", "PPPPiif", macros)
    return run.allow_shared(_shared_bytes(size, columns))
