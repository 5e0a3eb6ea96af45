"""Products of a decode step whose k is shared out, and the residual sum and norm that add them up.

cuBLAS shares k out too where a product has few tiles, but adds up in a kernel of its own, before
the norm's. Which of the two is quicker, in how many parts, is measured: split_products.json, as
`python -m perf.bench_products --write` wrote it. What it does not have runs in one part.
"""

import functools
import json
from pathlib import Path
from typing import Final

import torch
import torch.nn.functional as F

from gpu_ops.cuda_ops import add_parts_rms_norm_, add_rms_norm_

Tensor = torch.Tensor

TABLE: Final = Path(__file__).resolve().parent / "split_products.json"


def linear_add_rms_norm_(
    x: Tensor,
    weight: Tensor,
    residual: Tensor,
    norm: Tensor,
    eps: float,
    parts: int | None = None,
) -> Tensor:
    """As `ops.linear_add_rms_norm_`; k is cut into `parts`, by default as was measured."""
    if parts is None:
        bf16 = x.dtype == torch.bfloat16
        parts = parts_for(_name(x.device), *weight.shape, len(x)) if bf16 else 1
    if parts == 1:
        return add_rms_norm_(F.linear(x, weight), residual, norm, eps)
    return add_parts_rms_norm_(linear_in_parts(x, weight, parts), residual, norm, eps)


def linear_in_parts(x: Tensor, weight: Tensor, parts: int) -> Tensor:
    """[parts, n, out] float32, which add up to x weightᵀ. `parts` divides k into multiples of 8."""
    (rows, size), outputs = x.shape, weight.shape[0]
    if size % (8 * parts):
        raise ValueError(f"{size} elements cannot be cut into {parts} parts of whole groups of 8")
    of_x = x.view(rows, parts, -1).transpose(0, 1)
    of_weight = weight.view(outputs, parts, -1).permute(1, 2, 0)
    return torch.bmm(of_x, of_weight, out_dtype=torch.float32)


@functools.cache
def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device)


@functools.cache
def parts_for(device: str, outputs: int, size: int, rows: int) -> int:
    """As measured for the next larger number of rows; 1 beyond the largest."""
    for most, parts in _measured(device, outputs, size):
        if rows <= most:
            return parts
    return 1


def forget() -> None:
    """Reads the table again at the next call."""
    parts_for.cache_clear()
    _measured.cache_clear()


@functools.cache
def _measured(device: str, outputs: int, size: int) -> tuple[tuple[int, int], ...]:
    """(rows up to which they are used, parts), ascending; empty where nothing was measured."""
    rows = json.loads(TABLE.read_text()).get(device, {}).get(f"{outputs}x{size}", ())
    return tuple((int(most), int(parts)) for most, parts in rows)
