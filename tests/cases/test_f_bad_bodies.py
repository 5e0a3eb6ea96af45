"""Prompts that are too long, empty or null, and what errors look like: sglang#3910, #9599;
vllm#7283, #7632, #12886, #22099, #57997; llama.cpp#13178, #18463.

Also tests/e2e/test_bad_input.py and tests/http/test_bad_input.py.
"""

import re
from typing import Any

import httpx
import pytest

from tests.cases.asking import (
    CHAT,
    COMPLETIONS,
    CONTEXT,
    Json,
    answer,
    chat_body,
    complete,
    completion_body,
    refusal,
)
from tests.server_process import ServerProcess


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("more", [{}, {"n": 3}, {"echo": True, "logprobs": 1}], ids=str)
def test_prompts_as_long_as_the_context(server: ServerProcess, stream: bool, more: Json) -> None:
    """sglang#3910, #9599: one below it has room for one token; at it, and above, there is none.

    Where the client names no number of tokens, the default shrinks to that one.
    """
    for short_by, given in [
        (1, {"max_tokens": 1}),
        (1, {}),
        (0, {}),
        (-1, {}),
        (1, {"max_tokens": 2}),
    ]:
        body = {"model": "tiny", "prompt": "y" * (CONTEXT - short_by), "stream": stream}
        response = server.post(COMPLETIONS, {**body, "ignore_eos": True, **more, **given})
        if short_by < 1 or given.get("max_tokens") == 2:
            assert refusal(response, "prompt")["code"] == "context_length_exceeded"
        elif stream:
            assert response.text.count('"finish_reason":"length"') == more.get("n", 1)
        else:
            told = answer(response)
            assert told["choices"][0]["finish_reason"] == "length"
            assert told["usage"]["completion_tokens"] == more.get("n", 1)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", [CHAT, "/v1/responses", "/v1/messages"])
def test_chats_as_long_as_the_context(server: ServerProcess, path: str, stream: bool) -> None:
    """sglang#3910, #9599, llama.cpp#14566: the same of every API, with what its template adds."""
    empty = {"messages": [{"role": "user", "content": ""}]}
    added = answer(server.post("/tokenize", empty))["count"]
    for short_by in (1, 0, -1):
        text = "y" * (CONTEXT - added - short_by)
        body: Json = {"model": "tiny", "stream": stream, "ignore_eos": True}
        body |= {"input": text} if path.endswith("responses") else {
            "messages": [{"role": "user", "content": text}]
        }  # fmt: skip
        body |= {"max_tokens": 1} if path.endswith("messages") else {}
        response = server.post(path, body)
        if short_by < 1:
            assert response.status_code == 400
            assert response.headers["content-type"] == "application/json"
            message = response.json()["error"]["message"]
            assert f"maximum context length is {CONTEXT} tokens" in message
        else:
            assert response.status_code == 200
            ends = ('"length"', '"max_output_tokens"', '"max_tokens"')
            assert sum(response.text.count(f'reason":{end}') for end in ends) == 1
            counts = re.findall(r'"(?:completion|output)_tokens":(\d+)', response.text)
            assert counts[-1:] == ["1"] or (path == CHAT and stream)


def test_a_prompt_as_long_as_the_context_can_be_scored(server: ServerProcess) -> None:
    """sglang#3910: no token follows, so none needs room."""
    asked: Json = {"echo": True, "logprobs": 0, "max_tokens": 0}
    told = complete(server, "y" * CONTEXT, **asked)
    assert len(told["choices"][0]["logprobs"]["tokens"]) == CONTEXT
    refusal(server.post(COMPLETIONS, completion_body("y" * (CONTEXT + 1), **asked)), "prompt")


@pytest.mark.parametrize("prompt", ["", [], [""], ["a", ""], [[]], [[1], []], None, [None], {}, 5])
def test_prompts_of_nothing(server: ServerProcess, prompt: Any) -> None:
    """vllm#7283, #7632: this tokenizer adds no BOS, so that nothing would be left to compute."""
    param = refusal(server.post(COMPLETIONS, completion_body(prompt)))["param"]
    assert str(param).startswith("prompt")


CALL: Json = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    "message",
    [
        {"content": None, "tool_calls": [CALL]},
        {"tool_calls": [CALL]},
        {"content": "", "tool_calls": [CALL]},
        {"content": [], "tool_calls": [CALL]},
        {"content": None, "tool_calls": []},
        {"content": None, "tool_calls": None, "refusal": None, "audio": None, "name": None},
    ],
    ids=str,
)
def test_an_assistants_message_without_content(server: ServerProcess, message: Json) -> None:
    """llama.cpp#13178, #18463: to a template it is an empty text."""
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", **message},
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
    ]
    told = answer(server.post(CHAT, {**chat_body(), "messages": messages}))
    empty = [messages[0], {"role": "assistant", "content": ""}, messages[2]]
    same = answer(server.post(CHAT, {**chat_body(), "messages": empty}))
    assert told["usage"]["prompt_tokens"] == same["usage"]["prompt_tokens"]
    assert told["choices"] == same["choices"]


@pytest.mark.parametrize("role", ["user", "system", "tool"])
def test_nobody_else_may_say_nothing(server: ServerProcess, role: str) -> None:
    message = {"role": role, "content": None, "tool_call_id": "c1"}
    body = {**chat_body(), "messages": [message]}
    refusal(server.post(CHAT, body), "messages[0].content")


BAD: list[tuple[str, Any]] = [
    (CHAT, {}), (CHAT, {"model": "tiny"}), (CHAT, {"model": "tiny", "messages": []}),
    (CHAT, {"model": "tiny", "messages": "hi"}), (CHAT, {"model": "tiny", "messages": [None]}),
    (CHAT, chat_body(max_tokens=0)), (CHAT, chat_body(temperature="hot")), (CHAT, chat_body(n=0)),
    (CHAT, chat_body(stop=5)), (CHAT, chat_body(tools=[{}])), (CHAT, chat_body(stream="yes")),
    (CHAT, chat_body(response_format={"type": "xml"})), (CHAT, chat_body(stream_options={})),
    (CHAT, {**chat_body(), "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
    (COMPLETIONS, completion_body(suffix="end")), (COMPLETIONS, completion_body(best_of=2)),
    (COMPLETIONS, completion_body([1, "a"])), (COMPLETIONS, completion_body([272])),
    (COMPLETIONS, completion_body(logit_bias=[1])), (COMPLETIONS, completion_body(seed=2**64)),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body"), BAD, ids=[str(i) for i in range(len(BAD))])
def test_errors_are_objects_that_clients_can_read(
    server: ServerProcess, path: str, body: Json
) -> None:
    """vllm#12886, #22099, #57997: four keys in `error`, and nothing of Python in the message."""
    message = refusal(server.post(path, body))["message"]
    assert not any(part in message for part in ("Error(", "class '", "None", "True", "Traceback"))


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"", "application/json"),
        (b"{", "application/json"),
        (b"[]", "application/json"),
        (b"null", "application/json"),
        (b'{"model": "tiny", "prompt": "\xff"}', "application/json"),
        (b"model=tiny", "application/x-www-form-urlencoded"),
        (b"[" * 100_000, "application/json"),
    ],
    ids=["nothing", "half", "array", "null", "not UTF-8", "form", "deep"],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_bodies_that_are_no_objects(
    server: ServerProcess, path: str, content: bytes, kind: str
) -> None:
    """vllm#12886, #57997: the same of errors below the fields."""
    headers = {"content-type": kind}
    url = f"{server.url}{path}"
    refusal(httpx.post(url, content=content, headers=headers, verify=False))
