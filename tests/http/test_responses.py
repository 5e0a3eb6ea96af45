"""/v1/responses: openai-python's types and accumulator, the order of events, items as messages."""

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import httpx2
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from engine.grammar.spec import JsonObject, JsonSchema
from engine.request import Delta, Finish, TokenScore, TokenText
from httpd.app import create_app
from httpd.parsing.formats import Formats, ReasoningFormat, ToolsFormat
from httpd.service import Constraint
from tests.fakes_service import CARD, FakeService, context_refusal, delta
from tests.http.conftest import SETTINGS

pytestmark = pytest.mark.anyio

MODEL = "org/tiny-model"
TOOL = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": True,
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
EVENT: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)


@pytest.fixture
def hermes(service: FakeService) -> FakeService:
    service.card = replace(CARD, formats=Formats(ToolsFormat.HERMES, ReasoningFormat.QWEN3))
    return service


@pytest.fixture
async def sdk(service: FakeService) -> AsyncIterator[openai.AsyncOpenAI]:
    transport = httpx2.ASGITransport(create_app(service, SETTINGS))
    async with httpx2.AsyncClient(transport=transport) as http_client:
        yield openai.AsyncOpenAI(
            api_key="none", base_url="http://plait/v1", http_client=http_client, max_retries=0
        )


async def respond(client: httpx.AsyncClient, given: Any = "hi", **more: Any) -> httpx.Response:
    return await client.post("/v1/responses", json={"model": MODEL, "input": given, **more})


async def events(client: httpx.AsyncClient, **more: Any) -> list[dict[str, Any]]:
    """The events of a stream, each checked against openai-python's types."""
    response = await respond(client, stream=True, **more)
    assert response.headers["content-type"].startswith("text/event-stream")
    told = []
    for frame in response.text.removesuffix("\n\n").split("\n\n"):
        kind, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert kind == f"event: {event['type']}"
        EVENT.validate_python(event)
        told.append(event)
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    return told


def script(text: str, *, reasoning: str = "", finish: Finish = Finish.STOP) -> list[Delta]:
    thought = [delta("", reasoning=reasoning, tokens=1, reasoning_tokens=1)] if reasoning else []
    pieces = [text[at : at + 7] for at in range(0, len(text), 7)]
    last = delta("", finish, tokens=9, reasoning_tokens=len(thought))
    return [*thought, *(delta(piece, tokens=2) for piece in pieces), last]


# Answers


async def test_an_answer(client: httpx.AsyncClient, service: FakeService) -> None:
    answer = (await respond(client, instructions="Be brief.", metadata={"a": "b"})).json()
    Response.model_validate(answer)
    (item,) = answer["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert item["content"] == [
        {"type": "output_text", "text": "Hello!", "annotations": [], "logprobs": []}
    ]
    assert answer["usage"] == {
        "input_tokens": 5, "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
        "output_tokens": 4, "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": 9,
    }  # fmt: skip
    assert (answer["status"], answer["error"], answer["incomplete_details"]) == (
        "completed", None, None,
    )  # fmt: skip
    assert (answer["instructions"], answer["metadata"]) == ("Be brief.", {"a": "b"})
    (submission,) = service.submissions
    assert not submission.max_tokens_given
    assert submission.prompt.messages == (  # type: ignore[union-attr]
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"},
    )  # fmt: skip


async def test_reasoning_text_and_calls(client: httpx.AsyncClient, hermes: FakeService) -> None:
    hermes.script = script(f"Let me see. {CALL}{CALL}", reasoning="Rain?")
    answer = (await respond(client, tools=[TOOL])).json()
    Response.model_validate(answer)
    reasoning, message, first, second = answer["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Rain?"}]
    assert message["content"][0]["text"].strip() == "Let me see."
    assert (first["name"], json.loads(first["arguments"])) == ("weather", {"city": "Oslo"})
    assert first["call_id"] != second["call_id"]
    assert answer["usage"]["output_tokens_details"] == {"reasoning_tokens": 1}


async def test_one_call_where_parallel_ones_are_not_wanted(
    client: httpx.AsyncClient, hermes: FakeService
) -> None:
    hermes.script = script(CALL + CALL)
    answer = (await respond(client, tools=[TOOL], parallel_tool_calls=False)).json()
    assert [item["type"] for item in answer["output"]] == ["function_call"]
    assert answer["parallel_tool_calls"] is False
    assert hermes.generations[0].aborts == 1


async def test_an_answer_that_is_cut(client: httpx.AsyncClient, hermes: FakeService) -> None:
    hermes.script = script("Once upon", finish=Finish.LENGTH)
    answer = (await respond(client, max_output_tokens=9)).json()
    assert answer["status"] == "incomplete"
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert answer["output"][0]["status"] == "incomplete"
    assert hermes.submissions[0].params[0].max_new_tokens == 9
    hermes.script = script(CALL[:40], finish=Finish.LENGTH)
    answer = (await respond(client, tools=[TOOL])).json()
    assert [item["status"] for item in answer["output"]] == ["incomplete"]


async def test_an_empty_answer_is_a_message(
    client: httpx.AsyncClient, service: FakeService
) -> None:
    service.script = script("")
    answer = (await respond(client)).json()
    assert answer["output"][0]["content"][0]["text"] == ""
    assert (await events(client))[-1]["type"] == "response.completed"


# Streams


async def test_the_order_of_events(client: httpx.AsyncClient) -> None:
    told = await events(client)
    assert [event["type"].removeprefix("response.") for event in told] == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta",
        "output_text.delta", "output_text.delta", "output_text.done", "content_part.done",
        "output_item.done", "completed",
    ]  # fmt: skip
    assert (told[0]["response"]["status"], told[0]["response"]["usage"]) == ("in_progress", None)
    assert told[2]["item"]["content"] == []
    assert told[-1]["response"]["usage"]["total_tokens"] == 9
    assert told[-1]["response"]["output"] == [told[-2]["item"]]


async def test_a_stream_of_every_item(client: httpx.AsyncClient, hermes: FakeService) -> None:
    hermes.script = script(f"See: {CALL}", reasoning="Rain?")
    told = await events(client, tools=[TOOL])
    done = [event["item"] for event in told if event["type"] == "response.output_item.done"]
    assert [item["type"] for item in done] == ["reasoning", "message", "function_call"]
    assert told[-1]["response"]["output"] == done
    for index, kind in enumerate(("reasoning_text", "output_text", "function_call_arguments")):
        deltas = [e for e in told if e["type"] == f"response.{kind}.delta"]
        (end,) = [e for e in told if e["type"] == f"response.{kind}.done"]
        whole = end["arguments"] if "arguments" in end else end["text"]
        assert "".join(event["delta"] for event in deltas) == whole
        assert {event["output_index"] for event in [*deltas, end]} == {index}
        assert {event["item_id"] for event in [*deltas, end]} == {done[index]["id"]}


async def test_streams_that_end_early(client: httpx.AsyncClient, service: FakeService) -> None:
    service.script = script("Once", finish=Finish.LENGTH)
    told = await events(client)
    assert told[-1]["type"] == "response.incomplete"
    assert told[-1]["response"]["output"][0]["status"] == "incomplete"
    service.script = [delta("Hel", tokens=1), delta(finish=Finish.ERROR, error="out of pages")]
    told = await events(client)
    assert told[-1]["type"] == "response.failed"
    assert told[-1]["response"]["status"] == "failed"
    assert told[-1]["response"]["error"] == {"code": "server_error", "message": "out of pages"}
    service.script = [delta("Hel", tokens=1), RuntimeError("a secret")]
    told = await events(client)
    assert "secret" not in json.dumps(told) and told[-1]["type"] == "response.failed"


# openai-python


async def test_the_sdk(sdk: openai.AsyncOpenAI) -> None:
    answer = await sdk.responses.create(model=MODEL, input="hi")
    assert answer.output_text == "Hello!"
    assert answer.usage and answer.usage.input_tokens_details.cached_tokens == 2
    async with sdk.responses.stream(model=MODEL, input="hi") as stream:
        deltas = [e.delta async for e in stream if e.type == "response.output_text.delta"]
        final = await stream.get_final_response()
    assert deltas == ["Hel", "lo", "!"]
    assert final.output_text == "Hello!" and final.id.startswith("resp_")


async def test_the_sdk_takes_calls_back(sdk: openai.AsyncOpenAI, hermes: FakeService) -> None:
    hermes.script = script(f"See: {CALL}", reasoning="Rain?")
    async with sdk.responses.stream(model=MODEL, input="hi", tools=[TOOL]) as stream:  # type: ignore[list-item]
        final = await stream.get_final_response()
    call = final.output[2]
    assert call.type == "function_call"
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    history: Any = [{"role": "user", "content": "hi"}, *final.output, output]
    await sdk.responses.create(model=MODEL, input=history)
    prompt: Any = hermes.submissions[1].prompt
    _, assistant, tool = prompt.messages
    assert assistant["reasoning_content"] == "Rain?"
    assert assistant["content"][0]["text"].strip() == "See:"
    assert assistant["tool_calls"][0]["function"]["arguments"] == {"city": "Oslo"}
    assert tool == {"role": "tool", "content": "rain", "tool_call_id": call.call_id}


async def test_the_sdk_parses_structured_output(
    sdk: openai.AsyncOpenAI, service: FakeService
) -> None:
    class Place(BaseModel):
        city: str

    service.script = script('{"city": "Oslo"}')
    answer = await sdk.responses.parse(model=MODEL, input="where", text_format=Place)
    assert answer.output_parsed == Place(city="Oslo")
    constraint = service.submissions[0].constraint
    assert constraint is not None and constraint.param == "text.format.schema"
    assert isinstance(constraint.spec, JsonSchema)
    await sdk.responses.create(model=MODEL, input="x", text={"format": {"type": "json_object"}})
    assert service.submissions[1].constraint == Constraint(JsonObject(), "text.format")


# What is asked


async def test_items_become_messages(client: httpx.AsyncClient, service: FakeService) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    given = [
        {"role": "developer", "content": [{"type": "input_text", "text": "rules"}]},
        {"type": "message", "role": "user", "content": "hi"},
        {"type": "reasoning", "summary": [], "id": "r"},
        call,
        {**call, "call_id": "d"},
        {"type": "function_call_output", "call_id": "c", "output": [
            {"type": "input_text", "text": "1"}
        ]},
        {"role": "assistant", "content": "one"},
        {"role": "assistant", "content": "two"},
    ]  # fmt: skip
    assert (await respond(client, given)).status_code == 200
    prompt: Any = service.submissions[0].prompt
    calls = [
        {"type": "function", "function": {"name": "f", "arguments": {}}, "id": call_id}
        for call_id in "cd"
    ]
    assert prompt.messages == (
        {"role": "developer", "content": [{"type": "text", "text": "rules"}]},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": [{"type": "text", "text": "1"}], "tool_call_id": "c"},
        {"role": "assistant", "content": "one"},
        {"role": "assistant", "content": "two"},
    )


async def test_tools_reach_the_template_in_the_chats_form(
    client: httpx.AsyncClient, hermes: FakeService
) -> None:
    choice = {"type": "function", "name": "weather"}
    answer = (await respond(client, tools=[TOOL], tool_choice=choice)).json()
    assert answer["tools"] == [TOOL] and answer["tool_choice"] == choice
    (submission,) = hermes.submissions
    prompt: Any = submission.prompt
    function = {"name": "weather", "parameters": TOOL["parameters"]}
    assert prompt.template_kwargs == {"tools": [{"type": "function", "function": function}]}
    assert submission.constraint is not None and submission.constraint.param == "tools"


async def test_no_reasoning_where_none_is_wanted(
    client: httpx.AsyncClient, service: FakeService
) -> None:
    await respond(client, reasoning={"effort": "none"})
    await respond(client, reasoning={"effort": "high"}, store=True, include=["x"], user="u")
    kwargs = [submission.prompt.template_kwargs for submission in service.submissions]  # type: ignore[union-attr]
    assert kwargs == [{"enable_thinking": False}, {}]


IMAGE = [{"type": "input_image", "image_url": "data:"}]
CALL_ITEM = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"input": None}, "input"),
        ({"input": 5}, "input"),
        ({"input": []}, "input"),
        ({"input": ["x"]}, "input[0]"),
        ({"input": [{"role": "x", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": 5}]}, "input[0].content"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0]",
        ),
        ({"input": [{"role": "user", "content": [{"type": {}}]}]}, "input[0].content[0].type"),
        ({"input": [{"type": {}}]}, "input[0].type"),
        ({"input": [{"type": "reasoning", "content": 0}]}, "input[0].content"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{**CALL_ITEM, "name": None}]}, "input[0].name"),
        ({"input": [{**CALL_ITEM, "arguments": 5}]}, "input[0].arguments"),
        ({"input": [CALL_ITEM] * 60}, None),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
        ({"input": [{"type": "reasoning", "content": "x"}]}, "input[0].content"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": ""}]}, "tools[0].name"),
        ({"tools": [{**TOOL, "parameters": 5}]}, "tools[0].parameters"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
        ({"text": {"format": {"type": "x"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "schema": 5}}}, "text.format.schema"),
        ({"reasoning": {"effort": 5}}, "reasoning.effort"),
        ({"reasoning": "high"}, "reasoning"),
        ({"metadata": {"a": 5}}, "metadata.a"),
        ({"metadata": {"a": "x" * 513}}, "metadata.a"),
        ({"metadata": {"x" * 65: "a"}}, f"metadata.{'x' * 48}….[key]"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
    ],
)
async def test_refusals(
    client: httpx.AsyncClient, service: FakeService, more: dict[str, Any], param: str | None
) -> None:
    response = await respond(client, **{"given": "hi", **{
        "given" if name == "input" else name: value for name, value in more.items()
    }})  # fmt: skip
    if param is None:
        assert response.status_code == 200
        return
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert f"'{param}'" in error["message"]
    assert service.submissions == []


@pytest.mark.parametrize("number", ["1e999", "-1.0E+400", "9" * 300 + "e99", "1" * 310 + ".5"])
async def test_numbers_beyond_a_double(client: httpx.AsyncClient, number: str) -> None:
    """What is repeated in the answer must be JSON."""
    body = '{"model": "%s", "input": "1e999", "reasoning": {"x": [%s]}}'
    response = await client.post("/v1/responses", content=body % (MODEL, number))
    assert (response.status_code, response.json()["error"]["param"]) == (400, "reasoning")
    response = await client.post("/v1/responses", content=body % (MODEL, "1e99"))
    assert response.json()["reasoning"]["x"] == [1e99]


async def test_refusals_of_the_service(client: httpx.AsyncClient, service: FakeService) -> None:
    service.refusal = context_refusal()
    error = (await respond(client, stream=True)).json()["error"]
    assert (error["param"], error["code"]) == ("input", "context_length_exceeded")
    error = (await client.post("/v1/responses", json={"model": "x", "input": "y"})).json()["error"]
    assert error["code"] == "model_not_found"


# Log-probabilities


def scored(text: str, logprob: float = -0.5) -> TokenScore:
    token = TokenText(1, text, text.encode(), logprob)
    return TokenScore(token, 1, (TokenText(2, "x", b"x", -1.5),))


LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}


async def test_logprobs_of_the_text(client: httpx.AsyncClient, hermes: FakeService) -> None:
    """Of a message and nobody else; those of text that is held come with it."""
    hermes.script = [
        delta("", reasoning="Hm", tokens=1, reasoning_tokens=1),
        delta("Let", tokens=2, scores=(scored("Let"),)),
        delta("", tokens=3, scores=(scored("\ufffd", -2.0),)),
        delta(" me.", tokens=4, scores=(scored(" me."),)),
        delta(CALL, tokens=5, scores=(scored(CALL),)),
        delta("", Finish.STOP, tokens=6, ending=scored("<|end|>")),
    ]
    answer = (await respond(client, tools=[TOOL], **LOGPROBS)).json()
    Response.model_validate(answer)
    _, message, call = answer["output"]
    told = message["content"][0]["logprobs"]
    assert [one["token"] for one in told] == ["Let", "\ufffd", " me."]
    assert told[0] == {
        "token": "Let", "bytes": [76, 101, 116], "logprob": -0.5,
        "top_logprobs": [{"token": "x", "bytes": [120], "logprob": -1.5}],
    }  # fmt: skip
    assert answer["top_logprobs"] == 1 and call["type"] == "function_call"
    params = hermes.submissions[0].params[0]
    assert params.logprobs == 1
    streamed = await events(client, tools=[TOOL], **LOGPROBS)
    deltas = [one for one in streamed if one["type"] == "response.output_text.delta"]
    assert [one["token"] for each in deltas for one in each["logprobs"]] == [
        one["token"] for one in told
    ]
    (done,) = [one for one in streamed if one["type"] == "response.output_text.done"]
    assert done["logprobs"] == told
    assert streamed[-1]["response"]["output"][1]["content"][0]["logprobs"] == told


async def test_logprobs_are_told_where_they_are_asked_for(
    client: httpx.AsyncClient, service: FakeService
) -> None:
    for asked, wanted in (({}, None), ({"include": ["reasoning.encrypted_content"]}, None),
                          ({"include": LOGPROBS["include"]}, 0)):  # fmt: skip
        assert (await respond(client, **asked)).status_code == 200
        assert service.submissions[-1].params[0].logprobs == wanted
    refused = (await respond(client, top_logprobs=1)).json()["error"]
    assert (refused["param"], refused["code"]) == ("top_logprobs", "invalid_value")
    refused = (await respond(client, include=[1])).json()["error"]
    assert refused["param"] == "include[0]"
