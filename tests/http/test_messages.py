"""/v1/messages: Anthropic's shapes, the order of its events, its errors, blocks as messages."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import httpx
import pytest

from engine.grammar.spec import JsonSchema
from engine.request import ChatPrompt, Delta, Finish
from httpd.anthropic_input import read_turns
from httpd.app import create_app
from httpd.auth import Access, Keyring
from httpd.messages import MAX_TOOL_CALLS
from httpd.parsing.formats import Formats, ReasoningFormat, ToolsFormat
from httpd.service import Rejected, State
from tests.fakes_service import CARD, FakeService, context_refusal, delta
from tests.http.conftest import SETTINGS

pytestmark = pytest.mark.anyio

MODEL = "org/tiny-model"
MESSAGES = [{"role": "user", "content": "hi"}]
TOOL = {
    "name": "weather",
    "description": "of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
USAGE = {
    "input_tokens": 3, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 2,
    "output_tokens": 4,
}  # fmt: skip


@pytest.fixture
def hermes(service: FakeService) -> FakeService:
    service.card = replace(CARD, formats=Formats(ToolsFormat.HERMES, ReasoningFormat.QWEN3))
    return service


async def post(client: httpx.AsyncClient, **more: Any) -> httpx.Response:
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 9, **more}
    return await client.post("/v1/messages", json=body)


async def answer_of(client: httpx.AsyncClient, **more: Any) -> Any:
    response = await post(client, **more)
    assert response.status_code == 200, response.text
    return response.json()


async def events(client: httpx.AsyncClient, **more: Any) -> list[dict[str, Any]]:
    response = await post(client, stream=True, **more)
    assert response.headers["content-type"].startswith("text/event-stream")
    told = []
    for frame in response.text.removesuffix("\n\n").split("\n\n"):
        kind, data = frame.split("\n")
        told.append(json.loads(data.removeprefix("data: ")))
        assert kind == f"event: {told[-1]['type']}"
    return told


def accumulated(told: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a stream tells of, put together as Anthropic's clients do."""
    message: dict[str, Any] = {}
    inputs: dict[int, str] = {}
    for event in told:
        match event["type"]:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
            case "content_block_delta":
                assert event["index"] == len(message["content"]) - 1
                block, added = message["content"][-1], event["delta"]
                if added["type"] == "input_json_delta":
                    inputs[event["index"]] = inputs.get(event["index"], "") + added["partial_json"]
                else:
                    key = added["type"].removesuffix("_delta")
                    block[key] += added[key]
            case "content_block_stop":
                if event["index"] in inputs:
                    message["content"][-1]["input"] = json.loads(inputs[event["index"]])
            case "message_delta":
                message |= event["delta"]
                message["usage"] |= event["usage"]
    return message


def script(text: str, *, reasoning: str = "", finish: Finish = Finish.STOP) -> list[Delta]:
    thought = [delta("", reasoning=reasoning, tokens=1)] if reasoning else []
    pieces = [text[at : at + 7] for at in range(0, len(text), 7)]
    return [*thought, *(delta(piece, tokens=2) for piece in pieces), delta("", finish, tokens=4)]


# Answers


async def test_an_answer(client: httpx.AsyncClient, service: FakeService) -> None:
    answer = await answer_of(client, system="Be brief.", temperature=0.5, top_k=5, top_p=0.9)
    assert answer.pop("id").startswith("msg_")
    assert answer == {
        "type": "message", "role": "assistant", "model": MODEL,
        "content": [{"type": "text", "text": "Hello!"}],
        "stop_reason": "end_turn", "stop_sequence": None, "usage": USAGE,
    }  # fmt: skip
    (submission,) = service.submissions
    params = submission.params[0]
    assert (params.max_new_tokens, params.temperature, params.top_k) == (9, 0.5, 5)
    assert submission.max_tokens_given
    assert submission.prompt == ChatPrompt(
        ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"})
    )


async def test_why_it_ended(client: httpx.AsyncClient, hermes: FakeService) -> None:
    hermes.script = script("Once", finish=Finish.LENGTH)
    assert (await answer_of(client))["stop_reason"] == "max_tokens"
    hermes.script = [delta("a", Finish.STOP, tokens=1, stop_match="END")]
    answer = await answer_of(client, stop_sequences=["END"])
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "END")
    assert hermes.submissions[1].params[0].stop == ("END",)
    hermes.script = [delta("a", Finish.STOP, tokens=1, stop_match=7)]
    assert (await answer_of(client))["stop_reason"] == "end_turn"
    hermes.script = script(CALL)
    assert (await answer_of(client, tools=[TOOL]))["stop_reason"] == "tool_use"
    hermes.script = script('{"name": "weather", "arguments": {}}')
    choice = {"type": "tool", "name": "weather"}
    answer = await answer_of(client, tools=[TOOL], tool_choice=choice)
    assert answer["stop_reason"] == "tool_use"


async def test_every_kind_of_block(client: httpx.AsyncClient, hermes: FakeService) -> None:
    hermes.script = script(f"See: {CALL}{CALL}", reasoning="Rain?")
    answer = await answer_of(client, tools=[TOOL])
    thinking, text, first, second = answer["content"]
    assert thinking == {"type": "thinking", "thinking": "Rain?", "signature": ""}
    assert text["text"].strip() == "See:"
    assert (first["type"], first["name"], first["input"]) == (
        "tool_use", "weather", {"city": "Oslo"},
    )  # fmt: skip
    assert first["id"] != second["id"]
    told = accumulated(await events(client, tools=[TOOL]))
    for message in (answer, told):
        del message["id"], message["content"][2]["id"], message["content"][3]["id"]
    assert told == answer


async def test_one_call_where_parallel_ones_are_not_wanted(
    client: httpx.AsyncClient, hermes: FakeService
) -> None:
    hermes.script = script(CALL + CALL)
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    answer = await answer_of(client, tools=[TOOL], tool_choice=choice)
    assert [block["type"] for block in answer["content"]] == ["tool_use"]
    told = await events(client, tools=[TOOL], tool_choice=choice)
    assert accumulated(told)["stop_reason"] == "tool_use"


async def test_a_call_that_is_cut_has_an_object_for_input(
    client: httpx.AsyncClient, hermes: FakeService
) -> None:
    hermes.script = script(CALL[:50], finish=Finish.LENGTH)
    answer = await answer_of(client, tools=[TOOL])
    assert (answer["content"][0]["input"], answer["stop_reason"]) == ({}, "max_tokens")


# Streams


async def test_the_order_of_events(client: httpx.AsyncClient) -> None:
    told = await events(client)
    assert [event["type"] for event in told] == [
        "message_start", "ping", "content_block_start", "content_block_delta",
        "content_block_delta", "content_block_delta", "content_block_stop", "message_delta",
        "message_stop",
    ]  # fmt: skip
    start = told[0]["message"]
    assert (start["content"], start["stop_reason"]) == ([], None)
    assert start["usage"]["input_tokens"] == 5  # how many are cached is not known yet
    assert told[2]["content_block"] == {"type": "text", "text": ""}
    assert told[-2]["usage"] == USAGE
    assert accumulated(told)["content"] == [{"type": "text", "text": "Hello!"}]


async def test_an_error_within_a_stream(client: httpx.AsyncClient, service: FakeService) -> None:
    service.script = [delta("Hel", tokens=1), delta(finish=Finish.ERROR, error="out of pages")]
    error = {"type": "api_error", "message": "out of pages"}
    assert (await events(client))[-1] == {"type": "error", "error": error}


# What is asked


async def test_blocks_become_messages(client: httpx.AsyncClient, service: FakeService) -> None:
    def text(text: str) -> dict[str, Any]:
        return {"type": "text", "text": text}

    cached = {"cache_control": {"type": "ephemeral"}}
    turns = [
        {"role": "user", "content": [text("a"), text("b")]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": "x"},
            {"type": "redacted_thinking", "data": "x"},
            text("c"),
            {"type": "tool_use", "id": "1", "name": "f", "input": {"x": 1}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "1", "content": [text("d")]},
            {"type": "tool_result", "tool_use_id": "2", "content": "e", "is_error": True},
            {"type": "tool_result", "tool_use_id": "3"},
            {**text("f"), **cached},
        ]},
    ]  # fmt: skip
    await answer_of(client, messages=turns, system=[text("rules")])
    function = {"name": "f", "arguments": {"x": 1}}
    prompt: Any = service.submissions[0].prompt
    assert prompt.messages == (
        {"role": "system", "content": [text("rules")]},
        {"role": "user", "content": [text("a"), text("b")]},
        {"role": "assistant", "content": [text("c")], "reasoning_content": "hm",
         "tool_calls": [{"type": "function", "function": function, "id": "1"}]},
        {"role": "tool", "content": [text("d")], "tool_call_id": "1"},
        {"role": "tool", "content": "e", "tool_call_id": "2"},
        {"role": "tool", "content": "", "tool_call_id": "3"},
        {"role": "user", "content": [{**text("f"), **cached}]},
    )  # fmt: skip
    assert not prompt.continue_final


async def test_the_answer_goes_on_from_the_assistants_words(
    client: httpx.AsyncClient, service: FakeService
) -> None:
    await answer_of(client, messages=[*MESSAGES, {"role": "assistant", "content": "It is"}])
    prompt: Any = service.submissions[0].prompt
    assert prompt.continue_final


async def test_tools_and_thinking(client: httpx.AsyncClient, hermes: FakeService) -> None:
    await answer_of(client, tools=[TOOL], tool_choice={"type": "any"})
    await answer_of(client, thinking={"type": "enabled", "budget_tokens": 7})
    await answer_of(client, thinking={"type": "disabled"}, metadata={"user_id": "x"})
    asked, enabled, disabled = hermes.submissions
    function = {
        "name": "weather", "description": "of a city", "parameters": TOOL["input_schema"],
    }  # fmt: skip
    prompts: list[Any] = [asked.prompt, enabled.prompt, disabled.prompt]
    assert prompts[0].template_kwargs == {"tools": [{"type": "function", "function": function}]}
    assert asked.constraint is not None and asked.constraint.param == "tools"
    assert prompts[1].template_kwargs == {"enable_thinking": True}
    assert enabled.params[0].thinking_budget == 7
    assert prompts[2].template_kwargs == {"enable_thinking": False}


async def test_structured_output(client: httpx.AsyncClient, service: FakeService) -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    await answer_of(client, output_config={"format": form, "effort": "low"})
    constraint = service.submissions[0].constraint
    assert constraint is not None and constraint.param == "output_config.format.schema"
    assert constraint.spec == JsonSchema('{"type": "object"}')


async def test_tokens_are_counted(client: httpx.AsyncClient, service: FakeService) -> None:
    body = {"model": MODEL, "messages": MESSAGES, "system": "x"}
    response = await client.post("/v1/messages/count_tokens", json=body)
    assert response.json() == {"input_tokens": 3}
    messages = ({"role": "system", "content": "x"}, {"role": "user", "content": "hi"})
    assert service.prompts == [ChatPrompt(messages)]


def user(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [*blocks]}]}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"messages": [*MESSAGES, {"role": "assistant", "content": [*blocks]}]}


USE = {"type": "tool_use", "id": "1", "name": "f", "input": {}}


@pytest.mark.parametrize(
    ("more", "place"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [5]}, "messages[0]"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        (user(), "messages[0].content"),
        (user({"type": "text", "text": "x"}, {"type": "image"}), "messages[0].content[1]"),
        (user({"type": "tool_result"}), "messages[0].content[0].tool_use_id"),
        (user("x"), "messages[0].content[0]"),
        (assistant({**USE, "input": []}), "messages[1].content[0].input"),
        (assistant({**USE, "id": None}), "messages[1].content[0].id"),
        ({"system": 5}, "system"),
        ({"system": [{"type": "image"}]}, "system[0]"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"temperature": -1}, "temperature"),
        ({"tools": [{"type": "web_search_20250305", "name": "x"}]}, "tools[0].type"),
        ({"tools": [{**TOOL, "input_schema": 5}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "x"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": 5}}, "tool_choice.name"),
        ({"thinking": {"type": "x"}}, "thinking.type"),
        ({"thinking": {"type": 5}}, "thinking.type"),
        ({"thinking": {}}, "thinking.type"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"),
        ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"output_config": {"format": {"type": "x"}}}, "output_config.format.type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    ],
)
async def test_refusals(
    client: httpx.AsyncClient, service: FakeService, more: dict[str, Any], place: str
) -> None:
    response = await post(client, **more)
    assert response.status_code == 400, response.text
    body = response.json()
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert f"'{place}'" in body["error"]["message"]
    assert service.submissions == []


def test_calls_of_one_turn_are_bounded() -> None:
    (message,) = read_turns(assistant(*[USE] * MAX_TOOL_CALLS)["messages"][1:])
    assert len(message["tool_calls"]) == MAX_TOOL_CALLS
    with pytest.raises(Rejected, match="calls are more"):
        read_turns(assistant(*[USE] * (MAX_TOOL_CALLS + 1))["messages"])


# Errors of the layers around, which are not these routes' own


async def test_errors_have_anthropics_shape(
    client: httpx.AsyncClient, service: FakeService
) -> None:
    async def kind(response: httpx.Response, status: int) -> Any:
        assert response.status_code == status
        body = response.json()
        assert body["type"] == "error" and set(body["error"]) == {"type", "message"}
        return body["error"]["type"]

    assert await kind(await post(client, model="other"), 404) == "not_found_error"
    assert await kind(await post(client, system="x" * 5000), 413) == "request_too_large"
    assert await kind(await client.get("/v1/messages"), 405) == "invalid_request_error"
    assert await kind(await client.get("/v1/messages/x"), 404) == "not_found_error"
    service.refusal = context_refusal()
    assert await kind(await post(client), 400) == "invalid_request_error"
    service.refusal = RuntimeError("x")
    assert await kind(await post(client), 500) == "api_error"
    service.current_state = State.LOADING
    assert await kind(await post(client), 503) == "overloaded_error"
    assert "param" in (await client.get("/v1/messagesx")).json()["error"]


async def test_keys_and_timeouts_have_it_too(service: FakeService) -> None:
    access = Access(Keyring.of(["secret"]))
    settings = replace(SETTINGS, access=access, request_timeout_s=0.05)
    transport = httpx.ASGITransport(create_app(service, settings))
    async with httpx.AsyncClient(transport=transport, base_url="http://plait") as client:
        refused = await post(client)
        assert refused.json()["error"]["type"] == "authentication_error"
        client.headers["x-api-key"] = "secret"
        service.produce = asyncio.Event()
        late = await post(client)
        assert (late.status_code, late.json()["error"]["type"]) == (504, "timeout_error")
        assert (await events(client))[-1]["error"]["type"] == "timeout_error"
