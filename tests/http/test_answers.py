"""What a good request gets back, and what reaches the engine."""

import json
from typing import Any

import httpx
import pytest

from engine.request import ChatPrompt, Finish, TextPrompt, TokenPrompt
from tests.fakes_service import FakeService, context_refusal, delta

pytestmark = pytest.mark.anyio

MODEL = "org/tiny-model"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": MODEL, "prompt": "hi"}
USAGE = {
    "prompt_tokens": 5,
    "completion_tokens": 4,
    "total_tokens": 9,
    "prompt_tokens_details": {"cached_tokens": 2, "audio_tokens": 0},
    "completion_tokens_details": {"reasoning_tokens": 0, "audio_tokens": 0},
}


async def chat(client: httpx.AsyncClient, **more: Any) -> httpx.Response:
    return await client.post("/v1/chat/completions", json={**CHAT, **more})


async def complete(client: httpx.AsyncClient, **more: Any) -> httpx.Response:
    return await client.post("/v1/completions", json={**TEXT, **more})


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The JSON events of a stream that ended well."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *frames, done, rest = response.text.split("\n\n")
    assert done == "data: [DONE]" and rest == ""
    assert all(frame.startswith("data: ") and "\n" not in frame for frame in frames)
    return [json.loads(frame.removeprefix("data: ")) for frame in frames]


async def test_chat_object(client: httpx.AsyncClient) -> None:
    response = await chat(client)
    answer = response.json()
    assert answer.pop("id").startswith("chatcmpl-")
    assert isinstance(answer.pop("created"), int)
    assert answer.pop("system_fingerprint").startswith("fp_")
    message = {"role": "assistant", "content": "Hello!", "refusal": None}
    assert answer == {
        "object": "chat.completion",
        "model": MODEL,
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}],
        "usage": USAGE,
    }
    assert response.headers["content-type"] == "application/json"


async def test_completion_object(client: httpx.AsyncClient) -> None:
    answer = (await complete(client)).json()
    assert answer["id"].startswith("cmpl-")
    assert answer["object"] == "text_completion"
    choice = {"index": 0, "text": "Hello!", "logprobs": None, "finish_reason": "stop"}
    assert answer["choices"] == [choice]
    assert answer["usage"] == USAGE


async def test_chat_stream(client: httpx.AsyncClient) -> None:
    chunks = events(await chat(client, stream=True))
    heads = [{k: v for k, v in chunk.items() if k != "choices"} for chunk in chunks]
    assert all(head == heads[0] for head in heads)
    assert heads[0]["object"] == "chat.completion.chunk"
    assert set(heads[0]) == {"id", "object", "created", "model", "system_fingerprint"}
    choices = [chunk["choices"] for chunk in chunks]
    rest = {"index": 0, "logprobs": None}
    assert choices == [
        [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None, **rest}],
        [{"delta": {"content": "Hel"}, "finish_reason": None, **rest}],
        [{"delta": {"content": "lo"}, "finish_reason": None, **rest}],
        [{"delta": {"content": "!"}, "finish_reason": None, **rest}],
        [{"delta": {}, "finish_reason": "stop", **rest}],
    ]


async def test_completion_stream(client: httpx.AsyncClient) -> None:
    chunks = events(await complete(client, stream=True))
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    told = [(chunk["choices"][0]["text"], chunk["choices"][0]["finish_reason"]) for chunk in chunks]
    assert told == [("Hel", None), ("lo", None), ("!", None), ("", "stop")]


@pytest.mark.parametrize("ask", [chat, complete])
async def test_usage_comes_once_and_is_null_elsewhere(client: httpx.AsyncClient, ask: Any) -> None:
    options = {"include_usage": True, "include_obfuscation": False}
    *chunks, last = events(await ask(client, stream=True, stream_options=options))
    assert all("usage" in chunk and chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == [] and last["usage"] == USAGE


async def test_continuous_usage(client: httpx.AsyncClient) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(await chat(client, stream=True, stream_options=options))
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [0, 1, 3, 4, 4, 4]


async def test_stream_options_may_hold_nulls(client: httpx.AsyncClient) -> None:
    for options in ({"include_usage": None}, None):
        chunks = events(await chat(client, stream=True, stream_options=options))
        assert chunks and not any("usage" in chunk for chunk in chunks)


async def test_length_and_matched_stop(client: httpx.AsyncClient, service: FakeService) -> None:
    service.script = [delta("a", Finish.LENGTH, tokens=1)]
    choice = (await chat(client)).json()["choices"][0]
    assert choice["finish_reason"] == "length" and "stop_reason" not in choice
    service.script = [delta("a", Finish.STOP, tokens=1, stop_match="zz")]
    assert (await chat(client)).json()["choices"][0]["stop_reason"] == "zz"
    last = events(await complete(client, stream=True))[-1]["choices"][0]
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", "zz")


async def test_output_is_valid_whatever_the_text(
    client: httpx.AsyncClient, service: FakeService
) -> None:
    text = 'é\u2028\u0085\r\n"\x00 日本 🎉'
    service.script = [delta(text + "\ud83d", Finish.STOP, tokens=1)]
    expected = text + "\ufffd"
    assert (await chat(client)).json()["choices"][0]["message"]["content"] == expected
    response = await chat(client, stream=True)
    assert response.content.isascii()
    assert events(response)[1]["choices"][0]["delta"]["content"] == expected


async def test_defaults_reach_the_engine(client: httpx.AsyncClient, service: FakeService) -> None:
    await chat(client)
    await complete(client)
    chat_call, text_call = service.submissions
    assert not chat_call.max_tokens_given and chat_call.params[0].max_new_tokens == 64
    assert not text_call.max_tokens_given and text_call.params[0].max_new_tokens == 16
    assert text_call.prompt == TextPrompt("hi")
    params = chat_call.params[0]
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (1.0, 0, 1.0, 0.0)
    assert params.seed is None and params.stop == () and params.skip_special_tokens


async def test_parameters_reach_the_engine(client: httpx.AsyncClient, service: FakeService) -> None:
    response = await chat(
        client, max_tokens=7, max_completion_tokens=3, temperature=0.5, top_k=9, top_p=0.25,
        min_p=0.125, seed=-(2**63), stop=["a", "b", "a"], stop_token_ids=[3, 99], ignore_eos=True,
        skip_special_tokens=False, chat_template_kwargs={"enable_thinking": False},
    )  # fmt: skip
    assert response.status_code == 200, response.text
    (call,) = service.submissions
    assert call.params[0].max_new_tokens == 3 and call.max_tokens_given
    assert (call.params[0].temperature, call.params[0].top_k) == (0.5, 9)
    assert (call.params[0].top_p, call.params[0].min_p) == (0.25, 0.125)
    assert call.params[0].seed == -(2**63)
    assert call.params[0].stop == ("a", "b") and call.params[0].stop_token_ids == (3, 99)
    assert call.params[0].ignore_eos and not call.params[0].skip_special_tokens
    assert isinstance(call.prompt, ChatPrompt)
    assert call.prompt.template_kwargs == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("sent", "name", "meant"),
    [
        ({"temperature": 0}, "temperature", 0.0),
        ({"temperature": 1e-300}, "temperature", 0.0),
        ({"top_p": 0}, "top_p", 1e-6),
        ({"top_k": -1}, "top_k", 0),
        ({"top_k": 2**31 - 1}, "top_k", 0),
        ({"stop": "x"}, "stop", ("x",)),
        ({"stop": []}, "stop", ()),
        ({"bad_words": []}, "bad_words", ()),
        ({"bad_words": ["a", " b", "a"]}, "bad_words", ("a", " b")),
    ],
)
async def test_edge_values_mean_their_limit(
    client: httpx.AsyncClient, service: FakeService, sent: dict[str, Any], name: str, meant: object
) -> None:
    assert (await chat(client, **sent)).status_code == 200
    assert getattr(service.submissions[0].params[0], name) == meant


async def test_nulls_and_harmless_fields(client: httpx.AsyncClient, service: FakeService) -> None:
    nulls = dict.fromkeys(
        "max_tokens max_completion_tokens temperature top_p top_k min_p seed stop stop_token_ids "
        "ignore_eos skip_special_tokens stream stream_options n logprobs top_logprobs logit_bias "
        "presence_penalty frequency_penalty response_format tools tool_choice functions "
        "function_call modalities audio user metadata store chat_template_kwargs".split()
    )
    neutral = {
        "n": 1, "logprobs": False, "top_logprobs": 0, "logit_bias": {}, "presence_penalty": 0,
        "frequency_penalty": 0.0, "response_format": {"type": "text"}, "tools": [],
        "tool_choice": "none", "modalities": ["text"], "user": "u", "metadata": {"a": "b"},
        "store": True, "service_tier": "auto", "safety_identifier": "s",
        "reasoning_effort": "low", "verbosity": "low", "prediction": {"type": "content"},
        "parallel_tool_calls": True, "who_knows": [1],
    }  # fmt: skip
    for more in (nulls, neutral):
        response = await chat(client, **more)
        assert response.status_code == 200, response.text
    first, second = service.submissions
    assert first == second


@pytest.mark.parametrize(
    ("prompt", "meant"),
    [
        ("hi", TextPrompt("hi")),
        (["hi"], TextPrompt("hi")),
        ([1, 2, 99], TokenPrompt((1, 2, 99))),
        ([[1, 2]], TokenPrompt((1, 2))),
        ("cut \ud83d emoji", TextPrompt("cut \ufffd emoji")),
        ("\U0001f389", TextPrompt("\U0001f389")),
    ],
)
async def test_prompts(
    client: httpx.AsyncClient, service: FakeService, prompt: Any, meant: object
) -> None:
    body = json.dumps({"model": MODEL, "prompt": prompt})
    assert (await client.post("/v1/completions", content=body)).status_code == 200
    assert service.submissions[0].prompt == meant


async def test_messages_as_a_template_gets_them(
    client: httpx.AsyncClient, service: FakeService
) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    odd = {"id": "call_2", "type": "function", "function": {"name": "g", "arguments": "{oops"}}
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "name": "ann", "content": [{"type": "text", "text": "a"},
                                                    {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call, odd], "refusal": None},
        {"role": "tool", "tool_call_id": "call_1", "content": "42"},
        {"role": "assistant", "content": "ok", "tool_calls": [], "annotations": []},
        {"role": "user", "content": ""},
    ]  # fmt: skip
    assert (await chat(client, messages=messages)).status_code == 200
    prompt = service.submissions[0].prompt
    assert isinstance(prompt, ChatPrompt)
    parsed = {**call, "function": {"name": "f", "arguments": {"a": 1}}}
    assert prompt.messages == (
        messages[0],
        messages[1],
        {"role": "assistant", "content": None, "tool_calls": [parsed, odd]},
        {"role": "tool", "content": "42", "tool_call_id": "call_1"},
        {"role": "assistant", "content": "ok"},
        {"role": "user", "content": ""},
    )


async def test_unknown_fields_are_logged_once(
    client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        await chat(client, **{"odd\nname": 1})
    assert [record.getMessage() for record in caplog.records if "odd" in record.getMessage()] == [
        'requests name a field that is unknown and ignored: "odd\\nname"'
    ]


async def test_refusal_by_the_service_comes_before_the_stream(
    client: httpx.AsyncClient, service: FakeService
) -> None:
    service.refusal = context_refusal()
    response = await chat(client, stream=True)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("ending", "status", "code"),
    [
        (delta(finish=Finish.ERROR, error="out of pages"), 500, "generation_failed"),
        (delta(finish=Finish.ABORT), 503, "aborted"),
        (delta(finish=Finish.TIMEOUT, error="too late"), 503, "timeout"),
        (RuntimeError("secret at 0x7f00"), 500, "internal_error"),
    ],
)
async def test_failures_after_acceptance(
    client: httpx.AsyncClient, service: FakeService, ending: Any, status: int, code: str
) -> None:
    service.script = [delta("Hel", tokens=1), ending]
    response = await chat(client)
    assert response.status_code == status
    assert response.json()["error"]["code"] == code
    retry = "retry-after" in response.headers
    assert retry == (status == 503) and (response.headers.get("x-should-retry") == "false") != retry

    streamed = await chat(client, stream=True)
    assert streamed.status_code == 200
    *_, last, rest = streamed.text.split("\n\n")
    error = json.loads(last.removeprefix("data: "))["error"]
    assert error["code"] == code and error["type"] == "server_error" and rest == ""
    assert "secret" not in streamed.text + response.text
    assert [generation.aborts for generation in service.generations].count(1) == (
        2 if isinstance(ending, Exception) else 0
    )


async def test_a_generation_without_an_end_is_an_error(
    client: httpx.AsyncClient, service: FakeService
) -> None:
    service.script = [delta("Hel", tokens=1)]
    assert (await chat(client)).status_code == 500
    assert '"internal_error"' in (await chat(client, stream=True)).text
    assert [generation.aborts for generation in service.generations] == [1, 1]


async def test_what_nothing_meets_is_the_clients_fault(
    client: httpx.AsyncClient, service: FakeService
) -> None:
    """A 400 while nothing is sent, and else the last event; nobody tries again."""
    ending = delta(finish=Finish.UNSATISFIABLE, error="No token can come next.")
    service.script = [delta("Hel", tokens=1), ending]
    response = await chat(client)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "unsatisfiable")
    assert (error["type"], error["message"]) == ("invalid_request_error", "No token can come next.")
    *_, last, _ = (await chat(client, stream=True)).text.split("\n\n")
    assert json.loads(last.removeprefix("data: "))["error"] == error
