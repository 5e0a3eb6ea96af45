"""What may be asked of a generation: the limits of `SamplingParams`, in one table, and their check.

Engine and kernels rely on them: an id out of the vocabulary or a number that no int32 holds would
be found inside a step, which is everyone's. What each way in bounds more tightly, or by length, is
its own business. Knows neither prompts nor contexts.
"""

from collections.abc import Mapping
from reprlib import repr as shown
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from engine.request import ReasoningMarkers, SamplingParams
from engine.until_marker import WHITESPACE

INT32_MAX: Final = 2**31 - 1


class Limits(NamedTuple):
    """Least and greatest value, both allowed."""

    low: float
    high: float


LIMITS: Final[Mapping[str, Limits]] = MappingProxyType(
    {
        "max_new_tokens": Limits(0, INT32_MAX),
        "temperature": Limits(0, 100),
        "top_k": Limits(0, INT32_MAX),
        "top_p": Limits(0, 1),
        "min_p": Limits(0, 1),
        "seed": Limits(-(2**63), 2**63 - 1),
        "min_tokens": Limits(0, INT32_MAX),
        "presence_penalty": Limits(-2, 2),
        "frequency_penalty": Limits(-2, 2),
        "repetition_penalty": Limits(0.01, 2),
        "logit_bias": Limits(-100, 100),  # of each bias
        "logprobs": Limits(0, 20),  # descriptor.logprob_word has room for 254
        "prompt_logprobs": Limits(0, 20),
        "thinking_budget": Limits(0, INT32_MAX),
        "priority": Limits(-INT32_MAX, INT32_MAX),
    }
)

_INTEGERS: Final = ("max_new_tokens", "top_k", "min_tokens", "priority")
_INTEGERS_OR_NONE: Final = ("seed", "logprobs", "prompt_logprobs", "thinking_budget")
_DECIMALS: Final = (
    *("temperature", "top_p", "min_p"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
_FLAGS: Final = ("ignore_eos", "skip_special_tokens", "include_stop", "echo")


def check_params(params: SamplingParams, vocab_size: int) -> None:
    """Looks at every field; whatever it holds, it may be wrong.

    vocab_size  ids below it are the model's

    Raises ValueError naming the first field that is wrong, its value and the limit.
    """
    for name in (*_INTEGERS, *_INTEGERS_OR_NONE):
        value = getattr(params, name)
        if value is not None or name in _INTEGERS:
            _check_integer(name, value)
    for name in _DECIMALS:
        _check_decimal(name, getattr(params, name))
    for name in _FLAGS:
        if not isinstance(getattr(params, name), bool):
            raise _wrong(name, getattr(params, name), "True or False")
    for name in ("stop", "bad_words"):
        _check_texts(name, getattr(params, name))
    _check_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    if params.allowed_token_ids is not None:
        _check_ids("allowed_token_ids", params.allowed_token_ids, vocab_size)
        if not params.allowed_token_ids:
            raise _wrong("allowed_token_ids", (), "None, or at least one id")
    _check_biases(params.logit_bias, vocab_size)
    _check_markers(params.reasoning)
    if not isinstance(params.routing_key, str):
        raise _wrong("routing_key", params.routing_key, "a string")
    if params.min_tokens > params.max_new_tokens:
        most = f"at most max_new_tokens, {params.max_new_tokens}"
        raise _wrong("min_tokens", params.min_tokens, most)


def _check_integer(name: str, value: Any) -> None:
    if not _is_integer(value):
        raise _wrong(name, value, "an integer")
    _check_range(name, value)


def _check_decimal(name: str, value: Any) -> None:
    if not (_is_integer(value) or isinstance(value, float)):
        raise _wrong(name, value, "a number")
    _check_range(name, value)


def _check_range(name: str, value: float) -> None:
    low, high = LIMITS[name]
    if not low <= value <= high:  # as for NaN
        raise _wrong(name, value, f"between {low} and {high}")


def _check_texts(name: str, texts: Any) -> None:
    _check_is_tuple(name, texts)
    for text in texts:
        if not (isinstance(text, str) and text):
            raise _wrong(name, texts, "strings of at least one character")


def _check_ids(name: str, ids: Any, vocab_size: int) -> None:
    _check_is_tuple(name, ids)
    for token_id in ids:
        _check_id(name, token_id, vocab_size)


def _check_id(name: str, token_id: Any, vocab_size: int) -> None:
    if not (_is_integer(token_id) and 0 <= token_id < vocab_size):
        raise ValueError(
            f"{name} has {shown(token_id)}; ids are integers from 0, below {vocab_size}"
        )


def _check_biases(biases: Any, vocab_size: int) -> None:
    _check_is_tuple("logit_bias", biases)
    for pair in biases:
        if not (isinstance(pair, (tuple, list)) and len(pair) == 2):
            raise _wrong("logit_bias", biases, "pairs of an id and its bias")
        _check_id("logit_bias", pair[0], vocab_size)
        _check_decimal("logit_bias", pair[1])


def _check_markers(markers: Any) -> None:
    if markers is None:
        return
    if not isinstance(markers, ReasoningMarkers):
        raise _wrong("reasoning", markers, "ReasoningMarkers or None")
    for marker in (markers.opening, markers.closing):
        if not (isinstance(marker, str) and marker and marker == marker.strip(WHITESPACE)):
            raise ValueError(
                f"reasoning has the marker {shown(marker)}; one is text that neither begins nor "
                "ends with whitespace"
            )


def _check_is_tuple(name: str, value: Any) -> None:
    if not isinstance(value, (tuple, list)):
        raise _wrong(name, value, "a tuple")


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _wrong(name: str, value: Any, must_be: str) -> ValueError:
    return ValueError(f"{name} is {shown(value)}; it must be {must_be}")
