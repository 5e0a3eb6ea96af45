"""Rotary position embedding: the table of cosines and sines for each kind of context scaling.

Knows nothing of layers or devices' kernels. The arithmetic is done in float32 step by step as
transformers does it: a table in float64 would be better and give other tokens.
"""

import math

import torch

from engine.rope import Rope


def inverse_frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """[head_dim / 2] float32, radians per position."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    wavelengths = rope.theta**exponents
    plain = 1.0 / wavelengths
    if rope.kind == "default":
        return plain
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3_frequencies(rope, plain)
    return _yarn_frequencies(rope, head_dim, wavelengths)


def _llama3_frequencies(rope: Rope, plain: torch.Tensor) -> torch.Tensor:
    """Short waves stay, long ones are stretched by `factor`, those between are blended."""
    waves = 2 * math.pi / plain
    longest = rope.original_max_positions / rope.low_freq_factor
    shortest = rope.original_max_positions / rope.high_freq_factor
    stretched = torch.where(waves > longest, plain / rope.factor, plain)
    share = (rope.original_max_positions / waves - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - share) * stretched / rope.factor + share * stretched
    between = (waves >= shortest) & (waves <= longest)
    return torch.where(between, blended, stretched)


def _yarn_frequencies(rope: Rope, head_dim: int, wavelengths: torch.Tensor) -> torch.Tensor:
    """Fast dimensions keep their frequency, slow ones are interpolated, with a ramp between."""

    def dimension(rotations: float) -> float:
        turns = rope.original_max_positions / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # as transformers: no division by zero
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    keep = 1 - ramp
    return 1.0 / (rope.factor * wavelengths) * (1 - keep) + 1.0 / wavelengths * keep


def cos_sin_table(
    rope: Rope, head_dim: int, positions: int, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """[positions, head_dim] float32 on `device`: head_dim / 2 cosines, then as many sines."""
    if torch.device(device).type == "meta":  # where arange would import torch's compiler: 150 MB
        return torch.empty((positions, head_dim), dtype=torch.float32, device=device)
    frequencies = inverse_frequencies(rope, head_dim).to(device)
    angles = torch.arange(positions, device=device, dtype=torch.float32)[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * rope.attention_factor
