"""Structured output: the fields that say what an answer must be, as a grammar.

    response_format     OpenAI: text, json_object, json_schema
    structured_outputs  vLLM: json, json_object, regex, choice, grammar, structural_tag

What a grammar may contain is engine.grammar's to say, when it is compiled; here only the fields'
types are checked.
"""

import json
from collections.abc import Callable
from typing import Any

from engine.grammar.spec import (
    Choice,
    Grammar,
    GrammarSpec,
    JsonObject,
    JsonSchema,
    Regex,
    StructuralTags,
    Tag,
)
from httpd.errors import invalid, unsupported, wrong_type
from httpd.fields import ChoiceFields
from httpd.json_types import object_of, string_of
from httpd.service import Constraint
from httpd.text import shown, shown_name

MAX_TAGS = 128


def read_constraint(fields: ChoiceFields) -> Constraint | None:
    """What the answer must be, None for any text. Raises `Rejected` (400)."""
    by_format = _response_format(fields.response_format)
    by_structure = _structured_outputs(fields.structured_outputs)
    if by_format is not None and by_structure is not None:
        raise invalid(
            "Invalid 'structured_outputs': 'response_format' already says what the answer is.",
            "structured_outputs",
            "invalid_value",
        )
    constraint = by_format or by_structure
    if constraint is not None and isinstance(constraint.spec, Choice):
        _check_length(constraint.spec, fields.min_tokens)
    return constraint


def _check_length(choice: Choice, min_tokens: int) -> None:
    """Each token has a byte at least. Other forms that end too early end where they are whole."""
    longest = max(len(text.encode("utf-8", "replace")) for text in choice.texts)
    if min_tokens > longest:
        raise invalid(
            f"Invalid 'min_tokens': {min_tokens} is more than the longest choice of "
            f"'structured_outputs' can be, which has {longest} bytes.",
            "min_tokens",
            "integer_above_max_value",
        )


def _response_format(value: dict[str, Any] | None) -> Constraint | None:
    if value is None:
        return None
    kind = value.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return Constraint(JsonObject(), "response_format")
    if kind == "json_schema":
        path = "response_format.json_schema"
        holder = object_of(value.get("json_schema"), path)
        return Constraint(read_schema(holder.get("schema", {}), f"{path}.schema"), f"{path}.schema")
    raise unsupported(
        "response_format.type",
        f"Unsupported value for 'response_format.type': {shown(kind)}. Supported values are: "
        "text, json_object, json_schema.",
    )


def _structured_outputs(value: dict[str, Any] | None) -> Constraint | None:
    given = {name: each for name, each in (value or {}).items() if each is not None}
    if not given:
        return None
    name, *others = given
    path = f"structured_outputs.{shown_name(name)}"
    if others:
        raise invalid(
            f"Invalid 'structured_outputs': it has {shown(name)} and {shown(others[0])}, "
            f"{len(given)} fields in all; one is allowed.",
            "structured_outputs",
            "invalid_value",
        )
    if name not in _KINDS:
        raise unsupported(path, f"Unknown parameter: '{path}'.")
    return Constraint(_KINDS[name](given[name], path), path)


def _json_object(value: Any, path: str) -> GrammarSpec:
    if value is not True:
        raise wrong_type(path, "true", value)
    return JsonObject()


def read_schema(value: Any, path: str) -> GrammarSpec:
    """A schema, as an object or as JSON text. Raises `Rejected` (400)."""
    if isinstance(value, str):
        return JsonSchema(value)
    if not isinstance(value, dict | bool):
        raise wrong_type(path, "a JSON schema", value)
    return JsonSchema(json.dumps(value))


def _choice(value: Any, path: str) -> GrammarSpec:
    if not isinstance(value, list) or not value:
        raise wrong_type(path, "an array of strings", value)
    return Choice(tuple(string_of(each, f"{path}[{i}]") for i, each in enumerate(value)))


def _structural_tag(value: Any, path: str) -> GrammarSpec:
    """{"structures": [{"begin", "schema", "end"}], "triggers": […]}"""
    holder = object_of(value, path)
    structures, triggers = holder.get("structures"), holder.get("triggers")
    if not isinstance(structures, list) or not 0 < len(structures) <= MAX_TAGS:
        raise wrong_type(f"{path}.structures", f"an array of 1 to {MAX_TAGS} objects", structures)
    if not isinstance(triggers, list) or not 0 < len(triggers) <= MAX_TAGS:
        raise wrong_type(f"{path}.triggers", f"an array of 1 to {MAX_TAGS} strings", triggers)
    tags = []
    for index, structure in enumerate(structures):
        at = f"{path}.structures[{index}]"
        tag = object_of(structure, at)
        schema = read_schema(tag.get("schema", {}), f"{at}.schema")
        assert isinstance(schema, JsonSchema)
        begin, end = (string_of(tag.get(name), f"{at}.{name}") for name in ("begin", "end"))
        tags.append(Tag(begin, schema.schema, end))
    names = (string_of(each, f"{path}.triggers[{i}]") for i, each in enumerate(triggers))
    return StructuralTags(tuple(tags), tuple(names))


_KINDS: dict[str, Callable[[Any, str], GrammarSpec]] = {
    "json": read_schema,
    "json_object": _json_object,
    "regex": lambda value, path: Regex(string_of(value, path)),
    "choice": _choice,
    "grammar": lambda value, path: Grammar(string_of(value, path)),
    "structural_tag": _structural_tag,
}
