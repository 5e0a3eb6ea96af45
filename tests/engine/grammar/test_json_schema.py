"""Schemas: what is accepted produces valid values only; what cannot be kept is refused."""

import json
from typing import Any

import jsonschema
import pytest

from engine.grammar.compiler import GrammarCompiler
from engine.grammar.spec import GrammarError, JsonObject, JsonSchema
from engine.grammar.vocabulary import Vocabulary
from tests.fakes_vocabularies import byte_level_tokenizer, drawn

TOKENIZER = byte_level_tokenizer()
CLOSING = [TOKENIZER.token_to_id(text) for text in ('"', "}", "]", "1", "e", "l", '"}', '"]', "},")]

NODE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "integer", "minimum": -5, "exclusiveMaximum": 17},
                "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
            },
            "required": ["value", "next"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
ACCEPTED: dict[str, Any] = {
    "everything": True,
    "type": {"type": ["integer", "boolean", "null"]},
    "recursion": NODE,
    "short escapes": {"enum": ["\n\t\b\f\r", "\\/", "\x7f"]},
    "enum and const": {
        "type": "object",
        "properties": {
            "kind": {"enum": ["é", 'a"b', 3, None, [1, {"x": 2}]]},
            "v": {"const": -0.5},
        },
        "required": ["kind", "v"],
        "additionalProperties": False,
    },
    "anyOf": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "integer", "multipleOf": 7}]},
    "disjoint oneOf": {"oneOf": [{"type": "string", "maxLength": 4}, {"type": "boolean"}]},
    "allOf": {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
            {"properties": {"b": {"enum": [1, 2]}}, "required": ["b"]},
        ],
        "properties": {"a": {"maximum": 9}, "b": True},
        "additionalProperties": False,
    },
    "pattern": {"type": "string", "pattern": "^[a-c]{2,4}-[0-9]+$", "maxLength": 9},
    "pattern inside": {"type": "string", "pattern": "ab|ba", "maxLength": 8},
    "ranges": {"type": "number", "exclusiveMinimum": -1.5, "maximum": 2.25},
    "big range": {"type": "integer", "minimum": -(10**15), "maximum": 10**15},
    "items": {
        "type": "array",
        "prefixItems": [{"type": "boolean"}],
        "items": {"type": "integer", "minimum": 0, "maximum": 99},
        "minItems": 2,
        "maxItems": 4,
    },
    "pattern properties": {
        "type": "object",
        "patternProperties": {"^n_[a-z]$": {"type": "null"}, "^b[0-9]$": {"type": "boolean"}},
        "additionalProperties": False,
        "maxProperties": 3,
    },
    "additional properties": {
        "type": "object",
        "properties": {"a": {"type": "null"}},
        "required": ["a"],
        "additionalProperties": {"type": "integer"},
        "maxProperties": 3,
    },
    "lengths": {"type": "string", "minLength": 2, "maxLength": 5},
    "nothing but annotations": {"title": "t", "description": "d", "default": 1, "examples": [2]},
    "draft 7": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "definitions": {"s": {"type": "boolean"}},
        "type": "array",
        "items": [{"$ref": "#/definitions/s"}],
        "additionalItems": False,
    },
    **{
        f"format {name}": {"type": "string", "format": name}
        for name in ("date", "time", "date-time", "ipv4", "ipv6", "uuid", "email", "hostname")
    },
}
REFUSED: dict[str, tuple[Any, str]] = {
    "unknown type": ({"type": "objct"}, "objct"),
    "unknown format": ({"type": "string", "format": "fooo"}, "fooo"),
    "not": ({"not": {"type": "string"}}, "not"),
    "if": ({"if": {"type": "integer"}, "then": {"minimum": 3}}, "if"),
    "contains": ({"type": "array", "contains": {"const": 1}}, "contains"),
    "uniqueItems": ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    "propertyNames": ({"type": "object", "propertyNames": {"maxLength": 2}}, "propertyNames"),
    "unevaluated": ({"type": "object", "unevaluatedProperties": False}, "unevaluatedProperties"),
    "dependent": ({"dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    "overlapping oneOf": ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
    "look-ahead": ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
    "broken pattern": ({"type": "string", "pattern": "[a-"}, "unclosed"),
    "remote reference": ({"$ref": "http://127.0.0.1:9/schema.json"}, "127.0.0.1"),
    "missing reference": ({"$ref": "#/$defs/none"}, "none"),
    "reference to itself": ({"$ref": "#"}, "no output"),
    "nothing": (False, "false"),
    "empty range": ({"type": "integer", "minimum": 3, "maximum": 2}, ""),
    "names that may come twice": ({"type": "object", "minProperties": 2}, "minProperties 2"),
    "a number beyond floats": ({"maximum": 2**63 - 1}, str(2**63 - 1)),
    "a number beyond all": ({"const": 10**400}, "1000"),
    "switch of the library": ({"x-guidance": {"lenient": True}, "not": {}}, "x-guidance"),
    "a character without a short escape": ({"const": "a\x00b"}, "U+0000"),
    "such a character in a name": ({"properties": {"\x1f": {}}}, "U+001F"),
    "a list": ([], "neither an object nor"),
    "depth": (json.loads('{"items":' * 70 + "{}" + "}" * 70), "64 levels"),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_every_output_is_valid(
    name: str, compiler: GrammarCompiler, vocabulary: Vocabulary
) -> None:
    schema = ACCEPTED[name]
    draft = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    validator = draft(schema, format_checker=draft.FORMAT_CHECKER)
    grammar = compiler.compile(JsonSchema(json.dumps(schema)))
    ended = 0
    for seed in range(20):
        ids = drawn(grammar.matcher(), vocabulary, seed, CLOSING)
        if ids is not None:
            ended += 1
            text = TOKENIZER.decode(ids, skip_special_tokens=False)
            validator.validate(json.loads(text))
    assert ended >= 5, f"only {ended} of 20 outputs ended"


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_kept_is_refused(name: str, compiler: GrammarCompiler) -> None:
    schema, reason = REFUSED[name]
    with pytest.raises(GrammarError) as refusal:
        compiler.compile(JsonSchema(json.dumps(schema)))
    assert reason in refusal.value.message
    assert not refusal.value.transient


@pytest.mark.parametrize(
    "text", ["{", "", '{"a": NaN}', "[" * 100_000, '{"const": "\\ud800"}', "7"]
)
def test_what_is_no_schema_is_refused(text: str, compiler: GrammarCompiler) -> None:
    with pytest.raises(GrammarError):
        compiler.compile(JsonSchema(text))


def test_an_enum_of_long_texts_is_exact(compiler: GrammarCompiler, vocabulary: Vocabulary) -> None:
    names = [f"value number {number} of them" for number in range(1000)]
    grammar = compiler.compile(JsonSchema(json.dumps({"enum": names})))
    for text, right in ((names[777], True), (names[777][:-1], False), ("value number 1000", False)):
        matcher = grammar.matcher()
        taken = all(matcher.accept(each) for each in TOKENIZER.encode(json.dumps(text)).ids)
        assert (taken and matcher.is_complete) == right


def test_a_json_object_is_an_object(compiler: GrammarCompiler, vocabulary: Vocabulary) -> None:
    grammar = compiler.compile(JsonObject())
    values = []
    for seed in range(30):
        ids = drawn(grammar.matcher(), vocabulary, seed, CLOSING)
        values += [] if ids is None else [json.loads(TOKENIZER.decode(ids))]
    assert values and all(isinstance(value, dict) for value in values)


OPEN = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "additionalProperties": {"type": "string"},
}


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ('{"a": 1, "b": "x", "c": "\\n\\""}', True),
        ('{"a": 1, "a": "x"}', False),
        ('{"a": 1, "\\u0061": "x"}', False),
        ('{"\\u0061": "x"}', False),
        ('{"a": "x"}', False),
        ('{"b": 1}', False),
    ],
)
def test_a_name_cannot_be_spelled_in_another_way(
    text: str, right: bool, compiler: GrammarCompiler
) -> None:
    matcher = compiler.compile(JsonSchema(json.dumps(OPEN))).matcher()
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    assert (all(matcher.accept(each) for each in ids) and matcher.is_complete) == right
