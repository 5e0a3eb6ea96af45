"""What of JSON Schema is refused before the library sees it.

The library reads draft 2020-12 (and 4 to 2019-09 by `$schema`) and refuses keywords it knows but
does not keep: `not`, `if`, `contains`, `uniqueItems`, `propertyNames`, `dependent…`,
`unevaluated…`, `$dynamicRef`, and formats, patterns and ranges beyond its means. This module
refuses the rest: what would let an output through that the schema forbids. One such thing is left:
the formats `date` and `date-time` have a 29 February every year.
"""

import json
from collections.abc import Iterator
from typing import Any, Final, NoReturn

from engine.grammar.spec import GrammarError

# Where the library looks for options, one of which tells it to ignore what it does not support.
_OPTIONS: Final = "x-guidance"
# What may follow a backslash in a string: not u, or "\\u0061" would be another name than "a" to the
# library, and the same to whoever reads the output.
_ESCAPES: Final = 'nrbtf\\"'


def library_schema(text: str, depth_limit: int) -> str:
    """The schema in `text` as the library takes it.

    Raises GrammarError where it is no schema, or one that would not be kept.
    """
    try:
        schema = json.loads(text, parse_constant=_no_constant)
    except RecursionError as error:
        raise _too_deep(depth_limit) from error
    except ValueError as error:
        raise GrammarError(f"schema is not valid JSON: {error}") from error
    if not isinstance(schema, dict | bool):
        raise GrammarError(f"schema is a {type(schema).__name__}; it must be an object")
    for value, depth in _values(schema):
        if depth > depth_limit:
            raise _too_deep(depth_limit)
        if isinstance(value, int):
            _check_number(value)
        if isinstance(value, dict):
            _check_least_properties(value)
    return json.dumps(_with_options(schema) if isinstance(schema, dict) else schema)


def _with_options(schema: dict[str, Any]) -> dict[str, Any]:
    if _OPTIONS in schema:
        raise GrammarError(f"schema has {_OPTIONS!r}, which is not supported")
    return {**schema, _OPTIONS: {"json_allowed_escapes": _ESCAPES}}


def _check_number(value: int) -> None:
    """The library computes with 64-bit floats; a bound that is none of them would move."""
    try:
        exact = float(value) == value
    except OverflowError:
        exact = False
    if not exact:
        raise GrammarError(f"schema has the number {str(value)[:40]}, which is no 64-bit float")


def _check_least_properties(schema: dict[str, Any]) -> None:
    """A name may come twice in the library's objects, and then counts once for whoever reads it."""
    least, required = schema.get("minProperties"), schema.get("required")
    known = len(required) if isinstance(required, list) else 0
    if isinstance(least, int | float) and least > max(known, 1):
        raise GrammarError(
            f"schema has minProperties {least}; it must be at most 1, or the number of required"
        )


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _too_deep(limit: int) -> GrammarError:
    return GrammarError(f"schema is nested more than {limit} levels deep, which is the limit")


def _values(schema: Any) -> Iterator[tuple[Any, int]]:
    """Every value in a schema with its depth, without recursion."""
    waiting = [(schema, 1)]
    while waiting:
        value, depth = waiting.pop()
        yield value, depth
        children = value.values() if isinstance(value, dict) else value
        if isinstance(value, dict | list):
            waiting += [(each, depth + 1) for each in children]
