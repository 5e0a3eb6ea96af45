"""What a client can get wrong: each a 4xx that names field, value and limit, and reaches nobody."""

import json
from typing import Any

import httpx
import pytest

from tests.fakes_service import FakeService

pytestmark = pytest.mark.anyio

MODEL = "org/tiny-model"
USER = {"role": "user", "content": "hi"}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HUGE = 10**400


def messages(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}]}


def called(call: Any) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", "tool_calls": [call]}]}


def tool(name: str | None, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


# (route, what differs from a good body, status, param, code, words of the message)
CASES: list[tuple[str, dict[str, Any], int, str | None, str, list[str]]] = [
    # model
    (CHAT, {"model": None}, 400, "model", "missing_required_parameter", ["'model'"]),
    (CHAT, {"model": 3}, 400, "model", "invalid_type", ["'model'", "a string", "3"]),
    (CHAT, {"model": ""}, 404, "model", "model_not_found", ['""']),
    (CHAT, {"model": "gpt"}, 404, "model", "model_not_found", ['"gpt"']),
    (TEXT, {"model": "x" * 999}, 404, "model", "model_not_found", ["xxx", "…"]),
    # messages
    (CHAT, {"messages": None}, 400, "messages", "missing_required_parameter", ["'messages'"]),
    (CHAT, {"messages": []}, 400, "messages", "empty_array", ["'messages'", "at least 1", "0"]),
    (CHAT, {"messages": "hi"}, 400, "messages", "invalid_type", ["an array", '"hi"']),
    (CHAT, {"messages": ["hi"]}, 400, "messages[0]", "invalid_type", ["an object"]),
    (CHAT, {"messages": [None]}, 400, "messages[0]", "invalid_type", ["null"]),
    (CHAT, {"messages": [USER] * 65}, 400, "messages", "context_length_exceeded", ["65", "64"]),
    (CHAT, {"messages": [USER, {"content": "x"}]}, 400, "messages[1].role",
     "missing_required_parameter", ["messages[1].role"]),
    (CHAT, {"messages": [{"role": "bot", "content": "x"}]}, 400, "messages[0].role",
     "invalid_value", ['"bot"', "assistant"]),
    (CHAT, {"messages": [{"role": ["user"], "content": "x"}]}, 400, "messages[0].role",
     "invalid_type", ["a string"]),
    (CHAT, {"messages": [{"role": "user"}]}, 400, "messages[0].content", "invalid_type", ["null"]),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, 400, "messages[0].content",
     "invalid_type", ["5", "string"]),
    (CHAT, {"messages": [{"role": "user", "content": {"text": "x"}}]}, 400, "messages[0].content",
     "invalid_type", ["an object"]),
    (CHAT, messages(), 400, "messages[0].content", "empty_array", []),
    (CHAT, messages("x"), 400, "messages[0].content[0]", "invalid_type", ["an object"]),
    (CHAT, messages({"type": "text", "text": "x"}, {"type": "image_url", "image_url": {}}), 400,
     "messages[0].content[1]", "unsupported_value", ["image_url", "messages[0].content[1]"]),
    (CHAT, messages({"text": "x"}), 400, "messages[0].content[0].type",
     "missing_required_parameter", []),
    (CHAT, messages({"type": "text", "text": 1}), 400, "messages[0].content[0].text",
     "invalid_type", []),
    (CHAT, {"messages": [{"role": "tool", "content": "x"}]}, 400, "messages[0].tool_call_id",
     "missing_required_parameter", []),
    (CHAT, {"messages": [{**USER, "name": 1}]}, 400, "messages[0].name", "invalid_type", []),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": {}}]}, 400, "messages[0].tool_calls",
     "invalid_type", ["an array"]),
    (CHAT, called(1), 400, "messages[0].tool_calls[0]", "invalid_type", []),
    (CHAT, called({"id": "a"}), 400, "messages[0].tool_calls[0].function", "invalid_type", []),
    (CHAT, called({"function": {}}), 400, "messages[0].tool_calls[0].function.name",
     "missing_required_parameter", []),
    (CHAT, called({"function": {"name": "f", "arguments": 3}}), 400,
     "messages[0].tool_calls[0].function.arguments", "invalid_type", []),
    (CHAT, called({"type": "custom", "custom": {}}), 400, "messages[0].tool_calls[0].type",
     "unsupported_value", ["custom"]),
    # prompt
    (TEXT, {"prompt": None}, 400, "prompt", "missing_required_parameter", ["'prompt'"]),
    (TEXT, {"prompt": ""}, 400, "prompt", "empty_prompt", ["empty"]),
    (TEXT, {"prompt": []}, 400, "prompt", "empty_prompt", ["empty"]),
    (TEXT, {"prompt": [""]}, 400, "prompt[0]", "empty_prompt", []),
    (TEXT, {"prompt": ["a", []]}, 400, "prompt[1]", "empty_prompt", []),
    (TEXT, {"prompt": 7}, 400, "prompt", "invalid_type", ["7"]),
    (TEXT, {"prompt": False}, 400, "prompt", "invalid_type", ["false"]),
    (TEXT, {"prompt": {}}, 400, "prompt", "invalid_type", ["an object"]),
    (TEXT, {"prompt": ["a"] * 129}, 400, "prompt", "array_above_max_length", ["128", "129"]),
    (TEXT, {"prompt": [[1], "a", 2]}, 400, "prompt[2]", "invalid_type", []),
    (TEXT, {"prompt": [[["a"]]]}, 400, "prompt[0][0]", "invalid_type", []),
    (TEXT, {"prompt": [[1], [100]]}, 400, "prompt[1][0]", "invalid_token_id", ["100"]),
    (TEXT, {"prompt": [1, "a"]}, 400, "prompt[1]", "invalid_type", ['"a"']),
    (TEXT, {"prompt": [1, True]}, 400, "prompt[1]", "invalid_type", ["a boolean", "true"]),
    (TEXT, {"prompt": [1, 2.0]}, 400, "prompt[1]", "invalid_type", ["2.0"]),
    (TEXT, {"prompt": [1, None]}, 400, "prompt[1]", "invalid_type", ["null"]),
    (TEXT, {"prompt": [1, 100]}, 400, "prompt[1]", "invalid_token_id", ["100"]),
    (TEXT, {"prompt": [-1]}, 400, "prompt[0]", "invalid_token_id", ["-1", "100"]),
    (TEXT, {"prompt": [HUGE]}, 400, "prompt[0]", "invalid_token_id", ["bits"]),
    # numbers
    (CHAT, {"max_tokens": 0}, 400, "max_tokens", "integer_below_min_value", ["0", "minimum of 1"]),
    (CHAT, {"max_tokens": -5}, 400, "max_tokens", "integer_below_min_value", ["-5"]),
    (CHAT, {"max_tokens": HUGE}, 400, "max_tokens", "integer_above_max_value", ["bits"]),
    (CHAT, {"max_tokens": 1.5}, 400, "max_tokens", "invalid_type", ["an integer", "1.5"]),
    (CHAT, {"max_tokens": "5"}, 400, "max_tokens", "invalid_type", ["an integer", '"5"']),
    (CHAT, {"max_tokens": True}, 400, "max_tokens", "invalid_type", ["a boolean"]),
    (CHAT, {"max_completion_tokens": []}, 400, "max_completion_tokens", "invalid_type", []),
    (TEXT, {"max_tokens": 0}, 400, "max_tokens", "integer_below_min_value", []),
    (CHAT, {"temperature": -0.1}, 400, "temperature", "decimal_below_min_value", ["-0.1", "of 0"]),
    (CHAT, {"temperature": 2.1}, 400, "temperature", "decimal_above_max_value", ["2.1", "of 2"]),
    (CHAT, {"temperature": HUGE}, 400, "temperature", "invalid_type", ["bits"]),
    (CHAT, {"temperature": "1"}, 400, "temperature", "invalid_type", ["a number", '"1"']),
    (CHAT, {"temperature": True}, 400, "temperature", "invalid_type", ["a boolean"]),
    (CHAT, {"top_p": 1.01}, 400, "top_p", "decimal_above_max_value", ["1.01"]),
    (CHAT, {"top_p": -1}, 400, "top_p", "integer_below_min_value", ["-1"]),
    (CHAT, {"min_p": 2}, 400, "min_p", "integer_above_max_value", []),
    (CHAT, {"top_k": -2}, 400, "top_k", "integer_below_min_value", ["-2", "of -1"]),
    (CHAT, {"top_k": 2**31}, 400, "top_k", "integer_above_max_value", ["2147483647"]),
    (CHAT, {"seed": 2**63}, 400, "seed", "integer_above_max_value", ["9223372036854775807"]),
    (CHAT, {"seed": 0.5}, 400, "seed", "invalid_type", []),
    # stops
    (CHAT, {"stop": 5}, 400, "stop", "invalid_type", ["a string or an array of strings"]),
    (CHAT, {"stop": ""}, 400, "stop[0]", "string_too_short", ["at least 1"]),
    (CHAT, {"stop": ["a", 1]}, 400, "stop[1]", "invalid_type", []),
    (CHAT, {"stop": ["a", None]}, 400, "stop[1]", "invalid_type", ["null"]),
    (CHAT, {"stop": ["a"] * 17}, 400, "stop", "array_above_max_length", ["16", "17"]),
    (CHAT, {"stop": "x" * 1025}, 400, "stop[0]", "string_above_max_length", ["1024", "1025"]),
    (CHAT, {"stop_token_ids": [100]}, 400, "stop_token_ids[0]", "invalid_token_id", ["100"]),
    (CHAT, {"stop_token_ids": [-1]}, 400, "stop_token_ids[0]", "integer_below_min_value", []),
    (CHAT, {"stop_token_ids": 5}, 400, "stop_token_ids", "invalid_type", []),
    # choices, penalties, logprobs
    (CHAT, {"n": 0}, 400, "n", "integer_below_min_value", []),
    (CHAT, {"n": 129}, 400, "n", "integer_above_max_value", ["128"]),
    (CHAT, {"n": True}, 400, "n", "invalid_type", []),
    (CHAT, {"presence_penalty": 2.5}, 400, "presence_penalty", "decimal_above_max_value", ["2"]),
    (CHAT, {"frequency_penalty": -3}, 400, "frequency_penalty", "integer_below_min_value", []),
    (CHAT, {"repetition_penalty": 0}, 400, "repetition_penalty", "integer_below_min_value", ["0"]),
    (CHAT, {"min_tokens": 6, "max_tokens": 5}, 400, "min_tokens", "integer_above_max_value", ["5"]),
    (CHAT, {"logit_bias": {"x": 1}}, 400, "logit_bias", "invalid_token_id", ['"x"']),
    (CHAT, {"logit_bias": {"-1": 1}}, 400, "logit_bias", "invalid_token_id", []),
    (CHAT, {"logit_bias": {"191222": -100}}, 400, "logit_bias", "invalid_token_id", ["191222"]),
    (CHAT, {"logit_bias": {"1": 101}}, 400, "logit_bias.1", "integer_above_max_value", ["100"]),
    (CHAT, {"logit_bias": []}, 400, "logit_bias", "invalid_type", []),
    (CHAT, {"allowed_token_ids": []}, 400, "allowed_token_ids", "empty_array", []),
    (CHAT, {"allowed_token_ids": [100]}, 400, "allowed_token_ids[0]", "invalid_token_id", []),
    (CHAT, {"bad_words": "x"}, 400, "bad_words", "invalid_type", ["an array"]),
    (CHAT, {"bad_words": ["a", ""]}, 400, "bad_words[1]", "string_too_short", ["at least 1"]),
    (CHAT, {"bad_words": ["a", 3]}, 400, "bad_words[1]", "invalid_type", []),
    (CHAT, {"bad_words": ["x" * 65]}, 400, "bad_words[0]", "string_above_max_length", ["64"]),
    (TEXT, {"bad_words": ["a"] * 129}, 400, "bad_words", "array_above_max_length", ["128", "129"]),
    (CHAT, {"logprobs": 5}, 400, "logprobs", "invalid_type", ["a boolean"]),
    (CHAT, {"top_logprobs": 5}, 400, "top_logprobs", "invalid_value", ["logprobs"]),
    (CHAT, {"logprobs": True, "top_logprobs": 10**6}, 400, "top_logprobs",
     "integer_above_max_value", ["20"]),
    (TEXT, {"logprobs": 21}, 400, "logprobs", "integer_above_max_value", ["20"]),
    (TEXT, {"logprobs": True}, 400, "logprobs", "invalid_type", ["an integer"]),
    (TEXT, {"prompt_logprobs": 21}, 400, "prompt_logprobs", "integer_above_max_value", ["20"]),
    (CHAT, {"prompt_logprobs": -1}, 400, "prompt_logprobs", "integer_below_min_value", []),
    (TEXT, {"cache_salt": "x" * 257}, 400, "cache_salt", "string_above_max_length", ["256"]),
    # structured output
    (CHAT, {"response_format": {"type": "xml"}}, 400, "response_format.type",
     "unsupported_value", ["json_schema"]),
    (CHAT, {"response_format": {"type": "json_schema"}}, 400, "response_format.json_schema",
     "invalid_type", []),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}}, 400,
     "response_format.json_schema.schema", "invalid_type", []),
    (CHAT, {"structured_outputs": {"regex": 3}}, 400, "structured_outputs.regex",
     "invalid_type", []),
    (CHAT, {"structured_outputs": {"regex": "a", "choice": ["b"]}}, 400, "structured_outputs",
     "invalid_value", ["one"]),
    (CHAT, {"structured_outputs": {"choice": ["a", "\u00e9"]}, "min_tokens": 3}, 400, "min_tokens",
     "integer_above_max_value", ["2 bytes"]),
    (CHAT, {"structured_outputs": {"xml": "a"}}, 400, "structured_outputs.xml",
     "unsupported_value", []),
    (CHAT, {"structured_outputs": {"choice": []}}, 400, "structured_outputs.choice",
     "invalid_type", []),
    (CHAT, {"structured_outputs": {"choice": ["a", 1]}}, 400, "structured_outputs.choice[1]",
     "invalid_type", []),
    (CHAT, {"structured_outputs": {"structural_tag": {"structures": [], "triggers": ["<"]}}}, 400,
     "structured_outputs.structural_tag.structures", "invalid_type", []),
    (CHAT, {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, 400,
     "structured_outputs", "invalid_value", []),
    # tools
    (CHAT, {"tools": {}}, 400, "tools", "invalid_type", []),
    (CHAT, {"tools": [1]}, 400, "tools[0]", "invalid_type", []),
    (CHAT, {"tools": [{"type": "web_search"}]}, 400, "tools[0].type", "unsupported_value", []),
    (CHAT, {"tools": [{"type": "function"}]}, 400, "tools[0].function", "invalid_type", []),
    (CHAT, {"tools": [tool(None)]}, 400, "tools[0].function.name", "invalid_type", []),
    (CHAT, {"tools": [tool("x" * 65)]}, 400, "tools[0].function.name", "invalid_value", ["64"]),
    (CHAT, {"tools": [tool("f"), tool("f")]}, 400, "tools", "invalid_value", ["twice"]),
    (CHAT, {"tools": [tool("f", parameters=1)]}, 400, "tools[0].function.parameters",
     "invalid_type", []),
    (CHAT, {"tool_choice": "required"}, 400, "tool_choice", "invalid_value", ["tools"]),
    (CHAT, {"tools": [tool("f")], "tool_choice": "any"}, 400, "tool_choice",
     "unsupported_value", ["required"]),
    (CHAT, {"tools": [tool("f")], "tool_choice": {"type": "function"}}, 400, "tool_choice",
     "invalid_type", ["names no function"]),
    (CHAT, {"tools": [tool("f")], "tool_choice": {"type": "allowed_tools", "mode": "auto"}}, 400,
     "tool_choice.type", "unsupported_value", ["allowed_tools"]),
    (CHAT, {"tools": [tool("f")], "tool_choice": {"type": "function", "function": {"name": "g"}}},
     400, "tool_choice", "invalid_value", ['"g"']),
    (CHAT, {"tools": [tool("f")], "tool_choice": "required",
            "response_format": {"type": "json_object"}}, 400, "response_format",
     "invalid_value", []),
    # the last message
    (CHAT, {"continue_final_message": True}, 400, "continue_final_message", "invalid_value", []),
    (CHAT, {"add_generation_prompt": False}, 400, "add_generation_prompt",
     "unsupported_value", []),
    # switches
    (CHAT, {"stream": "true"}, 400, "stream", "invalid_type", ["a boolean", '"true"']),
    (CHAT, {"stream": 1}, 400, "stream", "invalid_type", []),
    (CHAT, {"ignore_eos": 0}, 400, "ignore_eos", "invalid_type", []),
    (CHAT, {"stream_options": {}}, 400, "stream_options", "unsupported_value", ["stream"]),
    (CHAT, {"stream": True, "stream_options": 1}, 400, "stream_options", "invalid_type", []),
    (CHAT, {"stream": True, "stream_options": {"include_usage": 1}}, 400,
     "stream_options.include_usage", "invalid_type", []),
    (CHAT, {"chat_template_kwargs": {"tokenize": True}}, 400, "chat_template_kwargs.tokenize",
     "unsupported_value", []),
    (CHAT, {"chat_template_kwargs": {"enable_thinking": "no"}}, 400,
     "chat_template_kwargs.enable_thinking", "invalid_type", []),
    (CHAT, {"chat_template_kwargs": []}, 400, "chat_template_kwargs", "invalid_type", []),
]  # fmt: skip

# Fields that would change the output, with a value that asks for something.
UNSUPPORTED: list[tuple[str, Any]] = [
    ("best_of", 2), ("suffix", "x"), ("functions", [{}]),
    ("function_call", {"name": "f"}), ("modalities", ["text", "audio"]), ("audio", {}),
    ("prompt_embeds", "AAAA"), ("chat_template", "{{ x }}"), ("length_penalty", 2.0),
    ("guided_regex", "(a+)+b"), ("use_beam_search", True), ("truncate_prompt_tokens", 5),
]  # fmt: skip


def good(route: str) -> dict[str, Any]:
    more = {"messages": [USER]} if route == CHAT else {"prompt": "hi"}
    return {"model": MODEL, "max_tokens": 4, **more}


def checked(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error object; its form is the same for every refusal."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    (error,) = response.json().values()
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert 0 < len(error["message"]) < 400
    return dict(error)


@pytest.mark.parametrize(("route", "wrong", "status", "param", "code", "words"), CASES)
@pytest.mark.parametrize("stream", [False, True])
async def test_bad_values(
    client: httpx.AsyncClient, service: FakeService, route: str, wrong: dict[str, Any],
    status: int, param: str | None, code: str, words: list[str], stream: bool,
) -> None:  # fmt: skip
    body = {**good(route), "stream": stream, **wrong}
    if "stream_options" in wrong:
        body.update(stream=wrong.get("stream", False))
    error = checked(await client.post(route, json=body), status)
    assert (error["param"], error["code"]) == (param, code), error
    for word in words:
        assert word in error["message"]
    assert service.submissions == []


@pytest.mark.parametrize(("name", "value"), UNSUPPORTED)
@pytest.mark.parametrize("route", [CHAT, TEXT])
async def test_unsupported_fields_are_refused_by_name(
    client: httpx.AsyncClient, service: FakeService, route: str, name: str, value: Any
) -> None:
    error = checked(await client.post(route, json={**good(route), name: value}), 400)
    assert (error["param"], error["code"]) == (name, "unsupported_value")
    assert f"'{name}'" in error["message"]
    assert service.submissions == []


BAD_BODIES: list[tuple[bytes, str]] = [
    (b"", "EOF"),
    (b"   ", "EOF"),
    (b"{", "line 1 column 1"),
    (b'{"model": "m",}', "trailing comma"),
    (b"model=m&prompt=x", "expected value"),
    (b'{"a": 1} trailing', "trailing characters"),
    (b'{"a": "\xff"}', "unicode"),
    (b'{"a": "\xed\xa0\x80"}', "unicode"),
    ('{"prompt": "hi"}'.encode("utf-16"), "expected value"),
    (b"\xef\xbb\xbf{}", "expected value"),
    (b'{"temperature": NaN}', "expected value at line 1 column 17"),
    (b'{"temperature": Infinity}', "expected value"),
    (b'{"temperature": -Infinity}', "invalid number"),
    (b'{"a": "\x01"}', "control character"),
    (b'{"a": "\\x"}', "escape"),
    (b'{"a": "\\ud83d" oops}', "expected `,`"),
    (b'{"max_tokens": ' + b"1" * 4000, "EOF"),
    (b'{"a":' + b"[" * 1500 + b"]" * 1500 + b"}", "recursion limit"),
    (b"[" * 4000, "recursion limit"),
    (b'{"a":' * 600 + b"1" + b"}" * 600, "recursion limit"),
]


@pytest.mark.parametrize(("body", "words"), BAD_BODIES)
@pytest.mark.parametrize("route", [CHAT, TEXT])
async def test_bad_bodies(
    client: httpx.AsyncClient, service: FakeService, route: str, body: bytes, words: str
) -> None:
    error = checked(await client.post(route, content=body), 400)
    assert words in error["message"]
    assert service.submissions == []


@pytest.mark.parametrize("body", [b"[]", b"null", b"1", b'"x"', b"true", b"[{}]"])
async def test_bodies_that_are_no_object(client: httpx.AsyncClient, body: bytes) -> None:
    error = checked(await client.post(CHAT, content=body), 400)
    assert error["code"] == "invalid_type" and "JSON object" in error["message"]


@pytest.mark.parametrize("digits", [b"1" * 4000, b"-" + b"9" * 4000, b"1e999", b"-1e999"])
async def test_numbers_beyond_measure(client: httpx.AsyncClient, digits: bytes) -> None:
    body = json.dumps({**good(TEXT), "temperature": 7}).encode().replace(b"7", digits)
    error = checked(await client.post(TEXT, content=body), 400)
    assert error["param"] == "temperature"


async def test_any_content_type_is_taken(client: httpx.AsyncClient) -> None:
    headers = {"content-type": "application/x-www-form-urlencoded"}
    response = await client.post(TEXT, content=json.dumps(good(TEXT)), headers=headers)
    assert response.status_code == 200


async def test_a_model_without_a_template_takes_no_chat(
    client: httpx.AsyncClient, service: FakeService
) -> None:
    service.card = type(service.card)("org/tiny-model", 0, 64, 100, has_chat_template=False)
    error = checked(await client.post(CHAT, json=good(CHAT)), 400)
    assert "chat template" in error["message"]
    assert (await client.post(TEXT, json=good(TEXT))).status_code == 200


@pytest.mark.parametrize("route", [CHAT, TEXT])
async def test_a_stream_has_no_place_for_a_prompts_logprobs(
    client: httpx.AsyncClient, route: str
) -> None:
    body = {**good(route), "stream": True, "prompt_logprobs": 1}
    error = checked(await client.post(route, json=body), 400)
    assert (error["param"], error["code"]) == ("prompt_logprobs", "unsupported_value")
