"""What of JSON Schema is refused before the library sees it.

The library reads draft 2020-12 (and 4 to 2019-09 by `$schema`) and refuses keywords it knows but
does not keep: `not`, `if`, `contains`, `uniqueItems`, `propertyNames`, `dependent…`,
`unevaluated…`, `$dynamicRef`, and formats, patterns and ranges beyond its means. This module
refuses the rest: what would let an output through that the schema forbids. One such thing is left:
the formats `date` and `date-time` have a 29 February every year.
"""

import json
import re
from collections.abc import Iterator
from typing import Any, Final, NoReturn

from engine.grammar.spec import GrammarError

# Where the library looks for options, one of which tells it to ignore what it does not support.
_OPTIONS: Final = "x-guidance"
# Characters that JSON can only spell as \u....; `escapes` says why no output contains that.
_UNSPOKEN: Final = re.compile(r"[\x00-\x07\x0b\x0e-\x1f]")


def check_schema(text: str, depth_limit: int) -> None:
    """Raises GrammarError where `text` is no schema, or one that would not be kept."""
    try:
        schema = json.loads(text, parse_constant=_no_constant)
    except RecursionError as error:
        raise _too_deep(depth_limit) from error
    except json.JSONDecodeError as error:
        raise GrammarError(f"schema is not valid JSON: {error}") from error
    except ValueError as error:  # Python reads no longer integers, and says so in its own words
        raise GrammarError("schema has a number that is out of range") from error
    if not isinstance(schema, dict | bool):
        raise GrammarError("schema is neither an object nor true or false")
    if isinstance(schema, dict) and _OPTIONS in schema:
        raise GrammarError(f"schema has {_OPTIONS!r}, which is not supported")
    for value, depth in _values(schema):
        if depth > depth_limit:
            raise _too_deep(depth_limit)
        _check(value)


def _check(value: Any) -> None:
    match value:
        case int():
            _check_number(value)
        case str():
            _check_characters(value)
        case dict():
            for name in value:
                _check_characters(name)
            _check_least_properties(value)


def _check_characters(text: str) -> None:
    found = _UNSPOKEN.search(text)
    if found:
        raise GrammarError(f"schema has the control character U+{ord(found[0]):04X} in a text")


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
    raise GrammarError(f"schema is not valid JSON: {name} is no number")


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
