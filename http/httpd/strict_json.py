"""Bytes from a client to plain JSON values, without the liberties that Python's parser takes.

Refused: NaN and infinities (spelt so, or by overflow as 1e999), names that occur twice in one
object, encodings other than UTF-8, deep nesting. Lone surrogates are replaced: a cut emoji in a
chat history is no reason to lose the conversation.
"""

import json
import math
import re
from typing import Any

from httpd.errors import invalid
from httpd.service import Rejected
from httpd.text import shown, well_formed

MAX_DEPTH = 64  # chat bodies need about 6, JSON schemas of tools about 20

# Text decoded from UTF-8 has no surrogates; only an escape can make one.
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`. Raises `Rejected` (400)."""
    try:
        value = _parse(body.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _bad_json(f"byte {error.start} is not valid UTF-8") from None
    if not isinstance(value, dict):
        raise invalid(
            f"The request body must be a JSON object, not {shown(value)}.", None, "invalid_type"
        )
    _check_depth(value)
    if _SURROGATE_ESCAPE.search(body):
        scrubbed: dict[str, Any] = _scrub(value)
        return scrubbed
    return value


def _parse(text: str) -> Any:
    try:
        return json.loads(
            text,
            parse_constant=_refuse_constant,
            parse_float=_finite,
            object_pairs_hook=_unique,
        )
    except json.JSONDecodeError as error:
        raise _bad_json(f"{error.msg} at line {error.lineno} column {error.colno}") from None
    except RecursionError:
        raise _too_deep() from None
    except ValueError:
        raise _bad_json("a number has too many digits") from None


def _bad_json(why: str) -> Rejected:
    return invalid(f"The request body is not valid JSON: {why}.", None, "invalid_json")


def _too_deep() -> Rejected:
    return _bad_json(f"it nests deeper than {MAX_DEPTH} levels")


def _refuse_constant(name: str) -> None:
    raise _bad_json(f"{name} is not a JSON number")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise _bad_json(f"the number {digits[:32]} is out of range")
    return number


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise _bad_json(f"the name {shown(twice)} occurs twice in one object")
    return value


def _check_depth(value: dict[str, Any]) -> None:
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for node in level
            for child in (node.values() if isinstance(node, dict) else node)
            if isinstance(child, (dict, list))
        ]
        if not level:
            return
    raise _too_deep()


def _scrub(value: Any) -> Any:
    """A copy with well-formed strings; depth was checked."""
    if isinstance(value, str):
        return well_formed(value)
    if isinstance(value, list):
        return [_scrub(item) for item in value]
    if isinstance(value, dict):
        return {well_formed(name): _scrub(item) for name, item in value.items()}
    return value
