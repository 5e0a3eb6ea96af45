"""The shape of streams, usage and tool calls: sglang#18335, #7708, #8316, #4700, #954, #3743,
#10012; vllm#18412, #8625, #13978; lmdeploy#3412; ollama#7963; llama.cpp#14566.

openai-python's own accumulator adds the chunks up. Also tests/http/test_choices.py and
tests/http/parsing.
"""

import json
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.cases.asking import (
    CHAT,
    COMPLETIONS,
    CONTEXT,
    Json,
    answer,
    chat,
    chat_body,
    chat_chunks,
    choices_of,
    complete,
    completion_body,
    completion_chunks,
    forced,
    message_of,
    refusal,
)
from tests.server_process import ServerProcess


def tool(name: str, **parameters: Any) -> Json:
    given = {
        "type": "object", "properties": parameters, "required": list(parameters),
        "additionalProperties": False,
    }  # fmt: skip
    return {"type": "function", "function": {"name": name, "parameters": given}}


TOOLS = [tool("weather", city={"enum": ["Oslo", "Rome"]}), tool("time")]
TWO_CALLS = (
    'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
)
CALLING: Json = {"tools": TOOLS, "max_tokens": 200, **forced(TWO_CALLS)}


def test_the_role_is_told_once_and_first(server: ServerProcess) -> None:
    """sglang#18335: also where reasoning comes first; nothing is told as null."""
    thought = {"max_tokens": 50, **forced("<think>hm</think>yes")}
    for asked in ({}, thought, CALLING):
        first, *rest = [choice["delta"] for choice in choices_of(chat_chunks(server, **asked))]
        assert first == {"role": "assistant", "content": ""}
        assert not any("role" in delta for delta in rest)
        assert not any(value is None for delta in rest for value in delta.values())


def test_calls_end_with_tool_calls(server: ServerProcess) -> None:
    """sglang#7708, #8316: in streams as in whole answers."""
    assert message_of(chat_chunks(server, **CALLING))[1] == "tool_calls"
    assert chat(server, **CALLING)["choices"][0]["finish_reason"] == "tool_calls"
    without: Json = {"tools": TOOLS, "max_tokens": 20, **forced("no call")}
    assert message_of(chat_chunks(server, **without))[1] == "stop"


def test_a_call_is_begun_once_and_its_arguments_go_on(server: ServerProcess) -> None:
    """vllm#18412, lmdeploy#3412, sglang#4700: id, type and name once; an index of its own each."""
    deltas = [choice["delta"] for choice in choices_of(chat_chunks(server, **CALLING))]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    begun = [call for call in calls if "id" in call]
    for index, name in enumerate(["weather", "time"]):
        begin, *rest = [call for call in calls if call["index"] == index]
        assert begin["function"] == {"name": name, "arguments": ""}
        assert begin["type"] == "function" and begin["id"].startswith("call_")
        assert rest and all(set(call) == {"index", "function"} for call in rest)
        assert all(set(call["function"]) == {"arguments"} for call in rest)
    assert len({call["id"] for call in begun}) == len(begun) == 2
    assert [call["index"] for call in calls] == sorted(call["index"] for call in calls)


def test_two_calls_as_clients_see_them(server: ServerProcess) -> None:
    """lmdeploy#3412: the accumulated stream is the whole answer."""
    message, finish = message_of(chat_chunks(server, **CALLING))
    assert (message["content"].strip(), finish) == ("Let me see.", "tool_calls")
    told = [call["function"] for call in message["tool_calls"]]
    assert [call["name"] for call in told] == ["weather", "time"]
    assert [json.loads(call["arguments"]) for call in told] == [{"city": "Oslo"}, {}]
    whole = chat(server, **CALLING)["choices"][0]["message"]
    assert [call["function"] for call in whole["tool_calls"]] == told
    assert whole["content"] == message["content"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("choice", "finish"),
    [
        ("required", "tool_calls"),
        ({"type": "function", "function": {"name": "weather"}}, "stop"),
    ],
    ids=["required", "named"],
)
def test_calls_that_must_come(
    server: ServerProcess, backend: Tokenizer, choice: Any, finish: str, stream: bool
) -> None:
    """sglang#7708, ollama#7963: whatever the model would say; a named one ends as OpenAI's does."""
    asked: Json = {"tools": TOOLS[:1], "tool_choice": choice, "max_tokens": 300}
    # Or whitespace would fill the context.
    asked["logit_bias"] = {str(token_id): -100 for token_id in backend.encode(" \n\r\t").ids}
    if stream:
        message, end = message_of(chat_chunks(server, **asked))
    else:
        told = chat(server, **asked)["choices"][0]
        message, end = told["message"], told["finish_reason"]
    assert end == finish
    assert not message["content"]
    for call in message["tool_calls"]:
        assert call["function"]["name"] == "weather"
        assert json.loads(call["function"]["arguments"])["city"] in ("Oslo", "Rome")


def test_a_reference_to_its_own_schema(server: ServerProcess, backend: Tokenizer) -> None:
    """`#` is the parameters' root, wherever they stand in the schema of the whole call."""
    leaf = {"type": "object", "properties": {"leaf": {"const": 1}}, "required": ["leaf"]}
    kids = {"type": "array", "items": {"anyOf": [{"$ref": "#"}, {"$ref": "#/$defs/leaf"}]}}
    tree = {
        "type": "object", "properties": {"kids": {**kids, "minItems": 1, "maxItems": 2}},
        "required": ["kids"], "$defs": {"leaf": {**leaf, "additionalProperties": False}},
    }  # fmt: skip
    function = {"name": "plant", "parameters": tree}
    asked: Json = {"tools": [{"type": "function", "function": function}], "max_tokens": 400}
    asked["logit_bias"] = {str(token_id): -100 for token_id in backend.encode(" \n\r\t").ids}
    depths = []
    for choice in chat(server, tool_choice="required", parallel_tool_calls=False, n=8, seed=1,
                       temperature=1, **asked)["choices"]:  # fmt: skip
        if choice["finish_reason"] == "tool_calls":
            (call,) = choice["message"]["tool_calls"]
            depths.append(depth(json.loads(call["function"]["arguments"])))
    assert max(depths) > 1, "none of the choices has a tree within a tree"


def depth(tree: Json) -> int:
    """Of a tree as the schema has it."""
    if tree == {"leaf": 1}:
        return 0
    assert list(tree) == ["kids"] and 1 <= len(tree["kids"]) <= 2
    return 1 + max(map(depth, tree["kids"]))


def test_answers_without_calls_have_no_key_for_them(server: ServerProcess) -> None:
    """vllm#13978: an empty list, sent back with the history, breaks templates."""
    message = chat(server, tools=TOOLS, tool_choice="none")["choices"][0]["message"]
    assert message["content"] and "tool_calls" not in message


@pytest.mark.parametrize("more", [{}, {"n": 3, "seed": 1, "temperature": 1}], ids=["one", "three"])
def test_the_usage_of_a_stream(server: ServerProcess, more: Json) -> None:
    """sglang#954, #3743, vllm#8625: once, at the end, and equal to that of the whole answer.

    A prompt counts once, however many choices it has; each of a choice's tokens counts.
    """
    asked: Json = {"max_tokens": 20, "ignore_eos": True, **more}
    options = {"stream_options": {"include_usage": True}}
    for ask, ask_stream in ((chat, chat_chunks), (complete, completion_chunks)):
        whole = ask(server, "count me", **asked)["usage"]
        *chunks, last = ask_stream(server, "count me", **asked, **options)
        assert last["choices"] == []
        counts = ("prompt_tokens", "completion_tokens", "total_tokens")
        assert [last["usage"][name] for name in counts] == [whole[name] for name in counts]
        assert whole["completion_tokens"] == 20 * more.get("n", 1)
        if ask is complete:
            assert whole["prompt_tokens"] == len("count me")  # each byte is a token
        assert whole["total_tokens"] == whole["prompt_tokens"] + whole["completion_tokens"]
        assert all(chunk["choices"] and chunk["usage"] is None for chunk in chunks)
        without = ask_stream(server, "count me", **asked)
        assert all(chunk["choices"] and "usage" not in chunk for chunk in without)


def test_the_usage_of_other_endpoints(server: ServerProcess) -> None:
    """sglang#10012: that of the same chat, under the names of each; none is 0 or left out."""
    asked: Json = {"temperature": 0, "model": "tiny"}
    prompt = "count me twice, please"
    wanted = chat(server, prompt, max_tokens=20)["usage"]
    body = {**asked, "input": prompt, "max_output_tokens": 20}
    whole = answer(server.post("/v1/responses", body))["usage"]
    stream = server.post("/v1/responses", {**body, "stream": True}).text
    last = json.loads(stream.rstrip().rsplit("data: ", 1)[1])["response"]["usage"]
    for told in (whole, last):
        assert told["input_tokens"] == wanted["prompt_tokens"] > 0
        assert told["output_tokens"] == wanted["completion_tokens"] > 0
        assert told["total_tokens"] == wanted["total_tokens"]
        assert told["input_tokens_details"]["cached_tokens"] > 0
        assert told["output_tokens_details"] == {"reasoning_tokens": 0}
    messages = [{"role": "user", "content": prompt}]
    anthropic = answer(
        server.post("/v1/messages", {**asked, "messages": messages, "max_tokens": 20})
    )["usage"]
    from_cache = anthropic["cache_read_input_tokens"]
    assert anthropic["input_tokens"] + from_cache == wanted["prompt_tokens"] and from_cache > 0
    assert anthropic["output_tokens"] == wanted["completion_tokens"]


def test_finish_reason_is_null_until_the_end(server: ServerProcess) -> None:
    """sglang#3743: there, and null; not absent, and not empty."""
    for chunks in (chat_chunks(server), completion_chunks(server)):
        *before, last = choices_of(chunks)
        assert all(choice["finish_reason"] is None for choice in before)
        assert last["finish_reason"] == "length"


@pytest.mark.parametrize("extra", [0, 1, 100_000 - CONTEXT])
def test_a_prompt_too_long_is_refused_before_the_first_byte(
    server: ServerProcess, extra: int
) -> None:
    """llama.cpp#14566: 400 and JSON, though a stream was asked for."""
    prompt = "x" * (CONTEXT + extra)
    for path, body in [
        (COMPLETIONS, completion_body(prompt, stream=True, max_tokens=1)),
        (CHAT, chat_body(prompt, stream=True, max_tokens=1)),
    ]:
        error = refusal(server.post(path, body))
        assert error["code"] == "context_length_exceeded"
        assert str(CONTEXT) in error["message"]
