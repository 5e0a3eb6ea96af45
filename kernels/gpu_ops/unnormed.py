"""Rows whose RMS norm is half done: what one product of a decode step hands to the next."""

from dataclasses import dataclass

import torch

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class Unnormed:
    """rms_norm(r, weight, eps), but for the division by the root of each row's mean square.

    That is one number a row, so it may come after a product just as well.

    x        [n, size] bf16: r times the norm's weight
    squares  [parts, n] float32: their sum over parts is that of r's squares
    """

    x: Tensor
    squares: Tensor
    eps: float
