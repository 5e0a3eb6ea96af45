"""Structured output: sglang#4574, #1776, #2414, #17576; vllm#17248, #17313, #47312, #11484;
TGI#2280.

Also tests/engine/grammar, where every schema of the JSON-Schema-Test-Suite is compiled, and
test_a_row_with_a_grammar_waits_for_its_token_and_nobody_else_does in
tests/engine/test_scheduler.py: a mask is made only for a token that is known. Nothing is guessed
ahead of it, so that no matcher has a step to take back (vllm#11484, sglang#17576).
"""

import json
import re
from functools import partial
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.cases.asking import (
    CHAT,
    COMPLETIONS,
    Json,
    at_once,
    chat,
    chat_body,
    chat_chunks,
    complete,
    complete_text,
    completion_body,
    forced,
    message_of,
    refusal,
    schema,
)
from tests.server_process import ServerProcess

EMAIL = re.compile(r"[^@\s]+@[^@\s]+")
BAD_SCHEMAS: list[Any] = [
    {"type": "objct"},
    {"type": ["string", "objct"]},
    {"type": 5},
    {"properties": []},
    {"properties": {"a": {"type": "nul"}}},
    {"$ref": "#/$defs/none"},
    {"$ref": "https://example.org/schema"},
    {"minLength": -1},
    {"pattern": "[a-"},
    {"enum": []},
    False,
    {"not": {}},
]
BAD_REGEXES = ["[a-", "(", ")", "*", "a{2,1}", "(?=x)", r"(a)\1", r"\p{Nope}", r"\2", "(?P<"]


@pytest.mark.parametrize("bad", BAD_SCHEMAS, ids=str)
def test_schemas_that_cannot_be_used(server: ServerProcess, bad: Any) -> None:
    """sglang#4574, #1776, vllm#17248, TGI#2280: refused before anything is queued."""
    for stream in (False, True):
        body = chat_body(stream=stream, **schema(bad))
        error = refusal(server.post(CHAT, body), "response_format.json_schema.schema")
        assert error["code"] == "invalid_grammar"
    as_text = {"structured_outputs": {"json": json.dumps(bad)}}
    refusal(server.post(COMPLETIONS, completion_body(**as_text)), "structured_outputs.json")
    parameters = {"type": "object", "properties": {"a": bad}, "required": ["a"]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    refusal(server.post(CHAT, chat_body(tools=tools, tool_choice="required")), "tools")


@pytest.mark.parametrize("regex", BAD_REGEXES)
def test_regexes_that_cannot_be_used(server: ServerProcess, regex: str) -> None:
    """vllm#17313."""
    asked = {"structured_outputs": {"regex": regex}}
    for path, body in [(CHAT, chat_body(**asked)), (COMPLETIONS, completion_body(**asked))]:
        error = refusal(server.post(path, body), "structured_outputs.regex")
        assert error["code"] == "invalid_grammar"


@pytest.mark.parametrize(
    "asked",
    [
        {"choice": []}, {"choice": [1]}, {"choice": ""}, {"regex": 5}, {"grammar": "start: ("},
        {"grammar": ""}, {"json": 5}, {"json": "{"}, {"json": "{}", "regex": "a"}, {"xml": "a"},
        {"structural_tag": {"structures": [], "triggers": []}}, {"json_object": False},
    ],
    ids=str,
)  # fmt: skip
def test_other_grammars_that_cannot_be_used(server: ServerProcess, asked: Json) -> None:
    """vllm#17313, #17248."""
    refusal(server.post(COMPLETIONS, completion_body(structured_outputs=asked)))


def test_a_format_is_kept_to(server: ServerProcess) -> None:
    """sglang#1776: `format` is either obeyed or refused, never ignored."""
    told = chat(server, max_tokens=900, temperature=1, seed=3, **schema(
        {"type": "string", "format": "email", "maxLength": 20}
    ))["choices"][0]  # fmt: skip
    assert told["finish_reason"] == "stop"
    assert EMAIL.fullmatch(json.loads(told["message"]["content"]))
    for unknown in ("emial", "x"):
        refusal(server.post(CHAT, chat_body(**schema({"type": "string", "format": unknown}))))


OBJECT = {
    "type": "object",
    "properties": {"kind": {"enum": ["a", "b"]}, "count": {"type": "integer", "maximum": 99}},
    "required": ["kind", "count"],
    "additionalProperties": False,
}


def unspaced(backend: Tokenizer) -> Json:
    """Lest a random model fill its answer with whitespace."""
    return {"logit_bias": {str(token_id): -100 for token_id in backend.encode(" \n\r\t").ids}}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_what_is_asked_for_is_what_comes(
    server: ServerProcess, backend: Tokenizer, stream: bool
) -> None:
    def text(**asked: Any) -> str:
        more: Json = {"temperature": 1, "seed": 3, "max_tokens": 300, **unspaced(backend), **asked}
        if stream:
            message, finish = message_of(chat_chunks(server, **more))
        else:
            choice = chat(server, **more)["choices"][0]
            message, finish = choice["message"], choice["finish_reason"]
        assert finish == "stop"
        return str(message["content"])

    value = json.loads(text(**schema(OBJECT)))
    assert value["kind"] in ("a", "b") and value["count"] <= 99 and len(value) == 2
    assert re.fullmatch("[a-f]{3,8}-?", text(structured_outputs={"regex": "[a-f]{3,8}-?"}))
    assert text(structured_outputs={"choice": ["Oui", "Non"]}) in ("Oui", "Non")
    greeting = {"grammar": 'start: "hi " NAME\nNAME: /[A-Z][a-z]{1,5}/'}
    assert re.fullmatch("hi [A-Z][a-z]{1,5}", text(structured_outputs=greeting))
    assert isinstance(json.loads(text(structured_outputs={"json": OBJECT})), dict)


@pytest.mark.parametrize(
    "more", [{"ignore_eos": True}, {"min_tokens": 8}, {"stop": ["never"], "n": 2}], ids=str
)
def test_a_grammar_ends_its_answer(server: ServerProcess, more: Json) -> None:
    """Whatever else says that the answer must go on: nothing may follow."""
    for choice in complete(server, **more, structured_outputs={"regex": "yes"})["choices"]:
        assert (choice["text"], choice["finish_reason"]) == ("yes", "stop")


def test_a_grammar_that_fails_fails_alone(server: ServerProcess) -> None:
    """vllm#47312: bad ones are compiled while others are compiled, run and answered."""
    alone = complete_text(server, "free", max_tokens=40, ignore_eos=True)

    def bad(regex: str) -> None:
        asked = {"structured_outputs": {"regex": f"{regex}[a-"}}
        refusal(server.post(COMPLETIONS, completion_body(**asked)))

    def good(text: str) -> None:
        assert complete_text(server, max_tokens=30, **forced(text)) == text

    def free() -> None:
        assert complete_text(server, "free", max_tokens=40, ignore_eos=True) == alone

    asked = [(partial(bad, f"x{i}"), partial(good, f"good {i}"), free) for i in range(5)]
    at_once([each for three in asked for each in three])


def test_masks_go_to_the_rows_they_are_for(server: ServerProcess, backend: Tokenizer) -> None:
    """sglang#2414: grammars and free requests in one batch, and each as it is alone."""
    constrained: Json = {"temperature": 1, "seed": 1, "max_tokens": 60, **unspaced(backend)}
    asked: list[Json] = [
        {**constrained, **schema(OBJECT)},
        {"prompt": "one", "max_tokens": 50, "ignore_eos": True},
        {"prompt": "two", "max_tokens": 60, "ignore_eos": True},
        {**constrained, "structured_outputs": {"regex": "[0-9]{20}"}},
        {"prompt": "three", "max_tokens": 30, "ignore_eos": True},
        {"prompt": "four", "max_tokens": 60, "temperature": 1, "seed": 4, "ignore_eos": True},
    ]
    alone = [complete_text(server, **each) for each in asked]
    assert json.loads(alone[0])["kind"] in ("a", "b") and alone[3].isdigit()
    for _ in range(2):
        assert at_once([partial(complete_text, server, **each) for each in asked]) == alone
