"""Rotary position embedding: the table of cosines and sines for each kind of context scaling.

Knows nothing of layers or devices' kernels. The arithmetic is done in float32 step by step as
transformers does it: a table in float64 would be better and give other tokens.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from engine.errors import ModelError

KINDS: Final = ("default", "linear", "llama3", "yarn")
DEFAULT_THETA: Final = 10_000.0  # of all supported families, where config.json is silent


@dataclass(frozen=True, slots=True)
class Rope:
    """Frequencies and scaling; fields that a kind does not use keep their defaults."""

    kind: str = "default"
    theta: float = DEFAULT_THETA
    factor: float = 1.0
    original_max_positions: int = 0  # llama3, yarn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 1.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float = 1.0  # yarn: multiplies cosines and sines
    truncate: bool = True  # yarn: correction range rounded to whole dimensions


def read_rope(config: Mapping[str, Any]) -> Rope:
    """The rope that a config.json describes, in either spelling.

    transformers 4: `rope_theta` and `rope_scaling`; 5: `rope_parameters` with both inside.
    Raises ModelError for an unknown kind, a missing or a senseless value.
    """
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(given, Mapping):
        raise ModelError(f"rope parameters are {given!r}; they must be an object")
    if any(isinstance(value, Mapping) for value in given.values()):
        raise ModelError("rope_parameters differ from layer to layer, which is not supported")
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in KINDS:
        raise ModelError(f"rope type is {kind!r}; supported are {', '.join(KINDS)}")
    for settings in (config, given):
        if settings.get("partial_rotary_factor", 1.0) != 1.0:
            raise ModelError("partial_rotary_factor other than 1 is not supported")
    theta = _positive(given, "rope_theta", config.get("rope_theta", DEFAULT_THETA))
    if kind == "default":
        return Rope(theta=theta)
    if kind == "linear":
        return Rope(kind, theta, _positive(given, "factor"))
    longest = config.get("max_position_embeddings")
    original = int(_positive(given, "original_max_position_embeddings", longest))
    return (_llama3 if kind == "llama3" else _yarn)(given, config, theta, original)


def _positive(settings: Mapping[str, Any], name: str, default: Any = None) -> float:
    value = settings.get(name)
    value = default if value is None else value
    good = isinstance(value, int | float) and not isinstance(value, bool)
    if not good or not math.isfinite(value) or value <= 0:
        raise ModelError(f"rope's {name} is {value!r}; it must be a positive number")
    return float(value)


def _llama3(
    given: Mapping[str, Any], config: Mapping[str, Any], theta: float, original: int
) -> Rope:
    low, high = _positive(given, "low_freq_factor"), _positive(given, "high_freq_factor")
    if high <= low:
        raise ModelError(f"rope's high_freq_factor is {high}; it must exceed low_freq_factor {low}")
    return Rope(
        "llama3",
        theta,
        _positive(given, "factor"),
        original,
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn(given: Mapping[str, Any], config: Mapping[str, Any], theta: float, original: int) -> Rope:
    if theta <= 1:
        raise ModelError(f"rope_theta is {theta}; yarn needs more than 1")
    if given.get("factor") is None:
        factor = _positive(config, "max_position_embeddings") / original
    else:
        factor = _positive(given, "factor")
    return Rope(
        "yarn",
        theta,
        factor,
        original,
        beta_fast=_positive(given, "beta_fast", 32.0),
        beta_slow=_positive(given, "beta_slow", 1.0),
        attention_factor=_yarn_attention_factor(given, factor),
        truncate=bool(given.get("truncate", True)),
    )


def _yarn_attention_factor(given: Mapping[str, Any], factor: float) -> float:
    """Given outright; else from mscale and mscale_all_dim; else the paper's 0.1 ln(factor) + 1."""
    if given.get("attention_factor") is not None:
        return _positive(given, "attention_factor")

    def magnitude(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    if given.get("mscale") and given.get("mscale_all_dim"):
        mscale, mscale_all_dim = _positive(given, "mscale"), _positive(given, "mscale_all_dim")
        return magnitude(mscale) / magnitude(mscale_all_dim)
    return magnitude(1.0)


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
    frequencies = inverse_frequencies(rope, head_dim).to(device)
    angles = torch.arange(positions, device=device, dtype=torch.float32)[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * rope.attention_factor
