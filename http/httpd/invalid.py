"""pydantic's first complaint, in OpenAI's words: field, value and limit."""

from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from httpd.errors import invalid, unsupported, wrong_type
from httpd.service import Rejected
from httpd.text import shown, shown_name

# pydantic error type -> what was expected
_EXPECTED = {
    "bool_type": "a boolean",
    "dict_type": "an object",
    "float_type": "a number",
    "int_type": "an integer",
    "list_type": "an array",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "string_type": "a string",
}
_EXPECTED_BY_FIELD = {"stop": "a string or an array of strings"}

# pydantic error type -> (code's end, what the limit is called, key of the limit in its context)
_LIMITS = {
    "greater_than_equal": ("below_min_value", "minimum", "ge"),
    "less_than_equal": ("above_max_value", "maximum", "le"),
}
# pydantic error type -> (code, what it must be, key of the limit in its context)
_LENGTHS = {
    "string_too_short": ("string_too_short", "at least {} characters long", "min_length"),
    "string_too_long": ("string_above_max_length", "at most {} characters long", "max_length"),
    "too_short": ("empty_array", "an array of at least {} items", "min_length"),
    "too_long": ("array_above_max_length", "an array of at most {} items", "max_length"),
}


def first_error(error: ValidationError) -> Rejected:
    """The refusal for a failed validation."""
    first = error.errors(include_url=False)[0]
    kind, value, context = first["type"], first["input"], first.get("ctx", {})
    param = _path(first["loc"])
    if kind == "missing":
        return invalid(
            f"Missing required parameter: '{param}'.", param, "missing_required_parameter"
        )
    if kind == "extra_forbidden":
        return unsupported(param, f"Unknown parameter: '{param}'.")
    if kind == "literal_error":
        one_of = context["expected"].replace("'", "")
        return unsupported(
            param,
            f"Unsupported value for '{param}': {shown(value)}. Supported values are: {one_of}.",
        )
    if kind in _LIMITS:
        return _beyond_limit(param, value, *_LIMITS[kind], context)
    if kind in _LENGTHS:
        code, must_be, key = _LENGTHS[kind]
        must_be = must_be.format(context[key])
        return invalid(f"Invalid '{param}': it must be {must_be}, not {_size(value)}.", param, code)
    return _other(param, first)


def _beyond_limit(
    param: str, value: Any, code: str, limit_name: str, key: str, context: dict[str, Any]
) -> Rejected:
    number = "integer" if isinstance(value, int) else "decimal"
    limit = f"{context[key]:g}" if isinstance(context[key], float) else context[key]
    return invalid(
        f"Invalid '{param}': {shown(value)} is {code.split('_')[0]} the {limit_name} of {limit}.",
        param,
        f"{number}_{code}",
    )


def _other(param: str, error: ErrorDetails) -> Rejected:
    expected = _EXPECTED_BY_FIELD.get(param) or _EXPECTED.get(error["type"])
    if expected is None:  # a kind that no field has today
        return invalid(f"Invalid '{param}': {shown(error['input'])}.", param, "invalid_value")
    return wrong_type(param, expected, error["input"])


def _size(value: Any) -> str:
    return f"{len(value)}" if isinstance(value, (str, list)) else shown(value)


def _path(location: tuple[int | str, ...]) -> str:
    """pydantic's ("stop", 1) as `stop[1]`; a name may be the client's own, of any length."""
    path = ""
    for step in location:
        name = f"[{step}]" if isinstance(step, int) else shown_name(step)
        path += f".{name}" if path and not isinstance(step, int) else name
    return path
