"""Tensor maps: what the copy engine must know of a bf16 tensor in global memory."""

import ctypes
from typing import Final

import torch

from gpu_ops.cuda_launch import check, driver

Tensor = torch.Tensor

_BYTES: Final = 128
_ALIGNMENT: Final = 64
_BFLOAT16: Final = 9  # CUtensorMapDataType
_SWIZZLE_128B: Final = 3
_PROMOTE_TO_256B: Final = 3  # L2 reads


def tensor_map(
    tensor: Tensor, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]
) -> bytes:
    """A map of bf16 `tensor` for copies of `box` elements, swizzled by 128 bytes, 0 outside.

    sizes    elements of each dimension, the innermost (contiguous) first
    strides  elements between neighbours, of all dimensions but the innermost
    box      elements that one copy takes; the innermost is 64
    """
    rank = len(sizes)
    buffer = ctypes.create_string_buffer(_BYTES + _ALIGNMENT)
    offset = -ctypes.addressof(buffer) % _ALIGNMENT
    status = driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(ctypes.addressof(buffer) + offset), _BFLOAT16, rank,
        ctypes.c_void_p(tensor.data_ptr()), (ctypes.c_uint64 * rank)(*sizes),
        (ctypes.c_uint64 * (rank - 1))(*(2 * stride for stride in strides)),
        (ctypes.c_uint32 * rank)(*box), (ctypes.c_uint32 * rank)(*[1] * rank),
        0, _SWIZZLE_128B, _PROMOTE_TO_256B, 0,
    )  # fmt: skip
    check(status, f"tensor map of {sizes} in boxes of {box}")
    return buffer.raw[offset : offset + _BYTES]
