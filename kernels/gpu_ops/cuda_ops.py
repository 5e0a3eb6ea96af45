"""The operations of `ops.py` on CUDA tensors, bf16 or float32. Signatures and meaning are there.

Guarantees
- Launches on torch's current stream; does not synchronise; safe under graph capture.
- Tensors are contiguous unless said otherwise; results are new tensors.
"""

import functools
from typing import Final

import torch

from gpu_ops.cuda_launch import Kernel, kernel

Tensor = torch.Tensor

_ELEMENT_BYTES: Final = {torch.bfloat16: 2, torch.float32: 4}
_GROUP: Final = 8  # elements that a thread takes at once
_MAX_THREADS: Final = 1024


def element_bytes(x: Tensor) -> int:
    """2 or 4. Raises TypeError for a dtype the kernels do not know."""
    try:
        return _ELEMENT_BYTES[x.dtype]
    except KeyError:
        raise TypeError(f"the CUDA kernels take bfloat16 and float32, not {x.dtype}") from None


@functools.cache
def _norm(name: str, parameters: str, element_bytes: int, vectors: int) -> Kernel:
    macros = {"ELEMENT_BYTES": element_bytes, "VECTORS": vectors}
    return kernel("norm.cu", name, parameters, macros)


def norm_shape(size: int) -> tuple[int, int]:
    """(threads of a row's block, groups of eight elements per thread)."""
    if size % _GROUP:
        raise ValueError(f"a normed row needs a multiple of {_GROUP} elements, not {size}")
    groups = size // _GROUP
    vectors = -(-groups // _MAX_THREADS)
    return -(-groups // (vectors * 32)) * 32, vectors


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `ops.rms_norm`; rows of a 2-d `x` may lie apart."""
    size = x.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = x.numel() // size
    if rows:
        if x.dim() > 2:
            x = x.reshape(-1, size)
        threads, vectors = norm_shape(size)
        run = _norm("rms_norm", "PPPiif", element_bytes(x), vectors)
        stride = x.stride(-2) if x.dim() > 1 else size
        pointers = x.data_ptr(), weight.data_ptr(), out.data_ptr()
        run.launch((rows, 1), threads, *pointers, size, stride, eps)
    return out


def add_rms_norm_(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `ops.add_rms_norm_`."""
    rows, size = x.shape
    out = torch.empty_like(x)
    if rows:
        threads, vectors = norm_shape(size)
        run = _norm("add_rms_norm", "PPPPif", element_bytes(x), vectors)
        pointers = x.data_ptr(), residual.data_ptr(), weight.data_ptr(), out.data_ptr()
        run.launch((rows, 1), threads, *pointers, size, eps)
    return out


def add_parts_rms_norm_(parts: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`add_rms_norm_` of a sum that is still in parts.

    parts  [count, n, size] float32; their sum is rounded to residual's dtype before it is added
    """
    rows, size = residual.shape
    out = torch.empty_like(residual)
    if rows:
        threads, vectors = norm_shape(size)
        run = _norm("add_parts_rms_norm", "PiPPPif", element_bytes(residual), vectors)
        run.launch(
            (rows, 1), threads, parts.data_ptr(), len(parts), residual.data_ptr(),
            weight.data_ptr(), out.data_ptr(), size, eps,
        )  # fmt: skip
    return out


def embed_rms_norm(ids: Tensor, table: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(table[ids], its rms_norm): the residual and the first layer's input, both [n, size].

    ids     [n] int32; one outside the table reads row 0
    table   [vocabulary, size]
    weight  [size]
    """
    (rows,), (vocabulary, size) = ids.shape, table.shape
    residual = torch.empty((rows, size), dtype=table.dtype, device=table.device)
    out = torch.empty_like(residual)
    if rows:
        threads, vectors = norm_shape(size)
        run = _norm("embed_rms_norm", "PPPPPiif", element_bytes(table), vectors)
        run.launch(
            (rows, 1), threads,
            ids.data_ptr(), table.data_ptr(), weight.data_ptr(), residual.data_ptr(),
            out.data_ptr(), size, vocabulary, eps,
        )  # fmt: skip
    return residual, out


@functools.cache
def _silu_mul(element_bytes: int) -> Kernel:
    return kernel("activation.cu", "silu_mul", "PPi", {"ELEMENT_BYTES": element_bytes})


def silu_mul(gate_up: Tensor) -> Tensor:
    """As `ops.silu_mul`; f is a multiple of 8."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    if size % _GROUP:
        raise ValueError(f"silu_mul needs a multiple of {_GROUP} columns, not {size}")
    out = torch.empty((rows, size), dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        threads = 128
        blocks = -(-size // (_GROUP * threads))
        run = _silu_mul(element_bytes(gate_up))
        run.launch((rows, blocks), threads, gate_up.data_ptr(), out.data_ptr(), size)
    return out


@functools.cache
def _qk_rope(element_bytes: int, head_dim: int) -> Kernel:
    macros = {"ELEMENT_BYTES": element_bytes, "HEAD_DIM": head_dim}
    return kernel("qk_rope.cu", "qk_norm_rope_store", "PPPPPPPPPiiif", macros)


def qk_norm_rope_store(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
) -> Tensor:
    """As `ops.qk_norm_rope_store`; positions and slots were written two or more kernels ago."""
    tokens = qkv.shape[0]
    kv_heads, head_dim = k_cache.shape[-2:]
    q_heads = qkv.shape[1] // head_dim - 2 * kv_heads
    if head_dim not in (64, 128, 256):
        raise ValueError(f"head_dim is {head_dim}: the CUDA kernel takes 64, 128 and 256")
    q = torch.empty((tokens, q_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    if tokens:
        threads = 256
        lanes = head_dim // 16
        blocks = -(-tokens * (q_heads + 2 * kv_heads) * lanes // threads)
        _qk_rope(element_bytes(qkv), head_dim).launch(
            (blocks, 1), threads,
            qkv.data_ptr(),
            0 if q_weight is None else q_weight.data_ptr(),
            0 if k_weight is None else k_weight.data_ptr(),
            cos_sin.data_ptr(), positions.data_ptr(), slots.data_ptr(), q.data_ptr(),
            k_cache.data_ptr(), v_cache.data_ptr(), tokens, q_heads, kv_heads, eps,
        )  # fmt: skip
    return q
