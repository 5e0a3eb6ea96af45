"""Rotary position embedding as a config.json describes it, for each kind of context scaling.

Knows nothing of tables (`rope_table.py`), layers or devices.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

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
