"""A spec as the library's own text, with our limits on its size and depth.

What the library would accept but not keep is refused in `schema`; what it refuses itself is left to
it. Nothing here compiles: a text that comes out may still be refused, or be too much.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Final

from engine.grammar.native import llguidance
from engine.grammar.schema import check_schema
from engine.grammar.spec import (
    Choice,
    Grammar,
    GrammarError,
    GrammarLimits,
    GrammarSpec,
    JsonObject,
    JsonSchema,
    Regex,
    StructuralTags,
    Tag,
)

# Everything up to the next trigger, or to the end.
_FREE_TEXT: Final = r"FREE: /(.|\n)*/"


def library_text(
    spec: GrammarSpec, limits: GrammarLimits, is_special: Callable[[str], bool]
) -> str:
    """What the library compiles for `spec`.

    is_special  whether a text is a special token, which a grammar names instead of spelling

    Raises GrammarError, with the field, its value and the limit.
    """
    match spec:
        case JsonSchema(schema):
            _check_bytes("schema", schema, limits)
            return _json_schema(schema, limits)
        case JsonObject():
            return _json_schema('{"type": "object"}', limits)
        case Regex(pattern):
            _check_bytes("regex", pattern, limits)
            return llguidance.LLMatcher.grammar_from_regex(pattern)
        case Choice(texts):
            return _choice(texts, limits)
        case Grammar(text):
            _check_bytes("grammar", text, limits)
            return _lark(text)
        case StructuralTags():
            return _structural_tags(spec, limits, is_special)


def _check_bytes(field: str, text: str, limits: GrammarLimits) -> None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise GrammarError(
            f"{field} is not valid Unicode: a lone surrogate at {error.start}"
        ) from error
    if size > limits.source_bytes:
        raise GrammarError(f"{field} has {size} bytes; the limit is {limits.source_bytes}")


def _json_schema(schema: str, limits: GrammarLimits) -> str:
    check_schema(schema, limits.schema_depth)
    return f'{{"grammars": [{{"json_schema": {schema}}}]}}'


def _choice(texts: tuple[str, ...], limits: GrammarLimits) -> str:
    if not 1 <= len(texts) <= limits.choices:
        raise GrammarError(f"choice has {len(texts)} texts; it must have 1 to {limits.choices}")
    _check_bytes("choice", "".join(texts), limits)
    return "start: " + " | ".join(_quoted(text) for text in dict.fromkeys(texts))


def _lark(text: str) -> str:
    if text.lstrip().startswith("{"):
        raise GrammarError("grammar is neither Lark nor GBNF: it starts with {")
    from llguidance.gbnf_to_lark import any_to_lark  # see `native`: it may not be installed

    try:
        return any_to_lark(text)
    except RecursionError as error:
        raise GrammarError("grammar is nested too deeply") from error
    except Exception as error:  # the converter raises bare Exceptions and what its code runs into
        raise GrammarError(f"grammar is not valid GBNF: {error}") from error


def _structural_tags(
    spec: StructuralTags, limits: GrammarLimits, is_special: Callable[[str], bool]
) -> str:
    """Free text, and after each trigger the rest of one of its tags.

    A trigger's rule is lazy: it ends with the first occurrence, so free text never contains one.
    """
    if not spec.tags or not all(spec.triggers):
        raise GrammarError("structural tags need at least one tag, and triggers that are not empty")
    _check_bytes("structural_tag", "".join(f"{tag.begin}{tag.end}" for tag in spec.tags), limits)
    _check_bytes("structural_tag", "".join(tag.schema for tag in spec.tags), limits)
    lines = ["", _FREE_TEXT]
    parts = []
    for number, trigger in enumerate(spec.triggers):
        bodies = [_tag_body(each, trigger, limits) for each in _tags_of(spec, number)]
        if bodies:
            parts.append(f"part_{number}")
            lines += _trigger_rules(number, trigger, is_special(trigger))
            lines.append(f"part_{number}: trigger_{number} ( {' | '.join(bodies)} )")
    lines[0] = f"start: ( {' | '.join(parts)} )* FREE"
    return "\n".join(lines)


def _tags_of(spec: StructuralTags, number: int) -> list[Tag]:
    """The tags whose first matching trigger is this one; each tag must have one."""
    owners = []
    for tag in spec.tags:
        matching = [i for i, trigger in enumerate(spec.triggers) if tag.begin.startswith(trigger)]
        if not matching:
            raise GrammarError(f"structural_tag: {tag.begin!r} starts with none of the triggers")
        if matching[0] == number:
            owners.append(tag)
    return owners


def _trigger_rules(number: int, trigger: str, special: bool) -> list[str]:
    if special:
        return [f"trigger_{number}: FREE {trigger}"]
    return [f"trigger_{number}[lazy]: /(.|\\n)*/ {_quoted(trigger)}"]


def _tag_body(tag: Tag, trigger: str, limits: GrammarLimits) -> str:
    check_schema(tag.schema, limits.schema_depth)
    words = [_quoted(tag.begin.removeprefix(trigger)), f"%json {tag.schema}", _quoted(tag.end)]
    return " ".join(words)


def _quoted(text: str) -> str:
    """A literal in Lark, which reads JSON's escapes."""
    return json.dumps(text)
