"""Several choices, logprobs, reasoning and tool calls, in answers and in streams."""

import asyncio
import dataclasses
import json
import math
from typing import Any

import httpx
import pytest
from openai.lib.streaming._deltas import accumulate_delta

from engine.grammar.spec import Choice, JsonObject, JsonSchema, Regex
from engine.request import (
    Delta,
    Finish,
    PromptText,
    ReasoningMarkers,
    TextPrompt,
    TokenScore,
    TokenText,
)
from httpd import endpoint
from httpd.app import create_app
from httpd.parsing.formats import Formats, ReasoningFormat, ToolsFormat
from httpd.service import Constraint, Job
from tests.fakes_service import CARD, FakeService, delta
from tests.http.conftest import SETTINGS

pytestmark = pytest.mark.anyio

MODEL = "org/tiny-model"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"$ref": "#/$defs/name"}},
                "$defs": {"name": {"type": "string"}},
            },
        },
    },
    {"type": "function", "function": {"name": "time"}},
]
TWO_CALLS = (
    'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
)


async def chat(client: httpx.AsyncClient, **more: Any) -> httpx.Response:
    messages = [{"role": "user", "content": "hi"}]
    body = {"model": MODEL, "messages": messages, **more}
    return await client.post("/v1/chat/completions", json=body)


async def complete(client: httpx.AsyncClient, **more: Any) -> httpx.Response:
    return await client.post("/v1/completions", json={"model": MODEL, "prompt": "hi", **more})


def chunks_of(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    *frames, done, _ = response.text.split("\n\n")
    assert done == "data: [DONE]"
    return [json.loads(frame.removeprefix("data: ")) for frame in frames]


def message_of(chunks: list[dict[str, Any]], index: int = 0) -> tuple[dict[str, Any], list[str]]:
    """What openai-python makes of one choice's chunks, and its finish reasons."""
    message: dict[object, object] = {}
    finishes = []
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] == index:
                message = accumulate_delta(message, choice["delta"])
                finishes += [choice["finish_reason"]] if choice["finish_reason"] else []
    return message, finishes  # type: ignore[return-value]


def texts(text: str, cut: int = 3) -> list[Delta]:
    """A generation of this text, a few characters at a time."""
    pieces = [text[at : at + cut] for at in range(0, len(text), cut)]
    deltas = [delta(piece, tokens=number) for number, piece in enumerate(pieces, 1)]
    return [*deltas, delta("", Finish.STOP, tokens=len(pieces))]


def score(text: str, logprob: float, *others: str) -> TokenScore:
    top = tuple(TokenText(9, other, other.encode(), logprob - 1) for other in others)
    return TokenScore(TokenText(5, text, text.encode(), logprob), 1, top)


# n, prompts, seeds


async def test_n_choices_of_one_prompt(client: httpx.AsyncClient, service: FakeService) -> None:
    answer = (await chat(client, n=3, seed=7)).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["Hello!"] * 3
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (5, 12)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 2
    (submission,) = service.submissions
    seeds = [params.seed for params in submission.params]
    assert seeds[0] == 7 and len(set(seeds)) == 3
    await chat(client, n=3, seed=7)
    assert [params.seed for params in service.submissions[1].params] == seeds
    await chat(client, n=2)
    assert [params.seed for params in service.submissions[2].params] == [None, None]


async def test_n_choices_stream_side_by_side(client: httpx.AsyncClient) -> None:
    chunks = chunks_of(await chat(client, n=3, stream=True))
    for index in range(3):
        message, finishes = message_of(chunks, index)
        assert message == {"role": "assistant", "content": "Hello!"}
        assert finishes == ["stop"]


async def test_prompts_side_by_side(client: httpx.AsyncClient, service: FakeService) -> None:
    answer = (await complete(client, prompt=["a", [1, 2]], n=2)).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["prompt_tokens"] == 10
    assert len(service.submissions) == 2
    chunks = chunks_of(await complete(client, prompt=["a", "b"], stream=True))
    for index in range(2):
        texts = [c["text"] for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert "".join(texts) == "Hello!"


async def test_one_prompt_that_is_refused_takes_the_others_along(
    client: httpx.AsyncClient, service: FakeService
) -> None:
    accepted = service.submit

    async def submit(job: Job) -> Any:
        if job.prompt == TextPrompt("bad"):
            service.refusal = ValueError("ours")
            raise service.refusal
        return await accepted(job)

    service.submit = submit  # type: ignore[method-assign]
    response = await complete(client, prompt=["good", "bad", "good"])
    assert response.status_code == 500
    assert all(generation.aborts for generation in service.generations)


async def test_a_client_that_leaves_ends_all_choices(
    client: httpx.AsyncClient, service: FakeService
) -> None:
    service.produce.clear()
    task = asyncio.create_task(chat(client, n=4, stream=True))
    while len(service.generations) < 4:
        await asyncio.sleep(0)
    await asyncio.gather(*(each.waiting.wait() for each in service.generations))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [each.aborts for each in service.generations] == [1] * 4


async def test_what_is_asked_reaches_the_engine(
    client: httpx.AsyncClient, service: FakeService
) -> None:
    await chat(
        client, presence_penalty=0.5, frequency_penalty=-1, repetition_penalty=1.2, min_tokens=2,
        logit_bias={"4": 7, "5": -100}, allowed_token_ids=[4, 5, 4], max_tokens=9, cache_salt="x",
        include_stop_str_in_output=True, logprobs=True, top_logprobs=3, priority=-4,
        prompt_cache_key="session",
    )  # fmt: skip
    (submission,) = service.submissions
    params = submission.params[0]
    assert (params.presence_penalty, params.frequency_penalty) == (0.5, -1)
    assert (params.repetition_penalty, params.min_tokens) == (1.2, 2)
    assert params.logit_bias == ((4, 7.0), (5, -100.0)) and params.allowed_token_ids == (4, 5)
    assert params.include_stop and params.logprobs == 3 and params.prompt_logprobs is None
    assert (params.priority, params.routing_key) == (-4, "session")
    assert submission.namespace == "x" and submission.constraint is None


# Logprobs


async def test_chat_logprobs(client: httpx.AsyncClient, service: FakeService) -> None:
    service.script = [
        delta("a", tokens=1, scores=(score("a", -0.5, "b"),)),
        delta("", tokens=2, scores=(score("\ufffd", -math.inf),)),  # its text is held back
        delta("c", Finish.STOP, tokens=3, scores=(score("c", -1.0),)),
    ]
    whole = (await chat(client, logprobs=True, top_logprobs=1)).json()["choices"][0]["logprobs"]
    assert [entry["token"] for entry in whole["content"]] == ["a", "\ufffd", "c"]
    assert whole["content"][0] == {
        "token": "a", "logprob": -0.5, "bytes": [97],
        "top_logprobs": [{"token": "b", "logprob": -1.5, "bytes": [98]}],
    }  # fmt: skip
    assert whole["content"][1]["logprob"] == -9999.0 and whole["refusal"] is None
    chunks = chunks_of(await chat(client, logprobs=True, top_logprobs=1, stream=True))
    told = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [one for each in told if each for one in each["content"]] == whole["content"]
    assert (await chat(client)).json()["choices"][0]["logprobs"] is None


async def test_completion_logprobs_with_echo(
    client: httpx.AsyncClient, service: FakeService
) -> None:
    prompt = PromptText("so", TokenText(1, "s", b"s", math.nan), (score("o", -2.0, "x"),))
    service.script = [
        delta("a", tokens=1, scores=(score("a", -0.5, "b"),), prompt=prompt),
        delta("b", Finish.LENGTH, tokens=2, scores=(score("b", -0.25, "c"),)),
    ]
    asked = {"echo": True, "logprobs": 1, "max_tokens": 2}
    choice = (await complete(client, **asked)).json()["choices"][0]
    assert choice["text"] == "soab"
    assert choice["logprobs"] == {
        "tokens": ["s", "o", "a", "b"],
        "token_logprobs": [None, -2.0, -0.5, -0.25],
        "top_logprobs": [
            None, {"x": -3.0, "o": -2.0}, {"b": -1.5, "a": -0.5}, {"c": -1.25, "b": -0.25}
        ],
        "text_offset": [0, 1, 2, 3],
    }  # fmt: skip
    chunks = chunks_of(await complete(client, **asked, stream=True))
    choices = [chunk["choices"][0] for chunk in chunks]
    assert "".join(each["text"] for each in choices) == "soab"
    told = [each["logprobs"] for each in choices if each["logprobs"]]
    for name, values in choice["logprobs"].items():
        assert [one for each in told for one in each[name]] == values
    params = service.submissions[0].params[0]
    assert params.echo and (params.logprobs, params.prompt_logprobs) == (1, 1)


async def test_a_completion_tells_the_ending_id_and_a_chat_does_not(
    client: httpx.AsyncClient, service: FakeService
) -> None:
    """A chat's are the tokens of its content, as at OpenAI; a completion's are all."""
    ending = score("<|end|>", -0.25)
    service.script = [
        delta("a", tokens=1, scores=(score("a", -0.5),)),
        delta("", Finish.STOP, tokens=2, ending=ending),
    ]
    told = (await complete(client, logprobs=0)).json()["choices"][0]["logprobs"]
    assert told["tokens"] == ["a", "<|end|>"] and told["token_logprobs"] == [-0.5, -0.25]
    content = (await chat(client, logprobs=True)).json()["choices"][0]["logprobs"]["content"]
    assert [one["token"] for one in content] == ["a"]


async def test_parts_of_characters_are_told_apart(
    client: httpx.AsyncClient, service: FakeService
) -> None:
    """As OpenAI writes them; and their place is the character's, whose other parts follow."""
    parts = [
        TokenText(number, "\ufffd", utf8, -float(number))
        for number, utf8 in enumerate((b"\xe4\xbb", b"\x8a", b"\x8b"))
    ]
    service.script = [
        delta("a", tokens=1, scores=(score("a", -0.5),)),
        delta("", tokens=2, scores=(TokenScore(parts[0], 1, (parts[0], parts[1])),)),
        delta("今b", Finish.LENGTH, tokens=4, scores=(
            TokenScore(parts[1], 1, (parts[1], parts[2])), score("b", -1.0))),
    ]  # fmt: skip
    told = (await complete(client, logprobs=2)).json()["choices"][0]["logprobs"]
    first, second, third = r"bytes:\xe4\xbb", r"bytes:\x8a", r"bytes:\x8b"
    assert told["tokens"] == ["a", first, second, "b"]
    assert told["top_logprobs"][1:3] == [{first: 0.0, second: -1.0}, {second: -1.0, third: -2.0}]
    assert told["text_offset"] == [0, 1, 1, 2]


PROMPT = PromptText("", TokenText(1, "s", b"s", math.nan), (score("o", -2.0, "x"),))
PROMPT_LOGPROBS = [
    None,
    {
        "9": {"logprob": -3.0, "rank": 1, "decoded_token": "x"},
        "5": {"logprob": -2.0, "rank": 1, "decoded_token": "o"},
    },
]


async def test_prompt_logprobs(client: httpx.AsyncClient, service: FakeService) -> None:
    """In vLLM's form and places."""
    service.script = [
        delta("a", tokens=1, prompt=PROMPT),
        delta("b", Finish.LENGTH, tokens=2),
    ]
    told = (await chat(client, prompt_logprobs=1)).json()
    assert told["prompt_logprobs"] == PROMPT_LOGPROBS
    assert told["choices"][0]["logprobs"] is None
    told = (await complete(client, prompt_logprobs=1)).json()
    assert told["choices"][0]["prompt_logprobs"] == PROMPT_LOGPROBS
    assert (told["choices"][0]["text"], told["choices"][0]["logprobs"]) == ("ab", None)
    assert "prompt_logprobs" not in told
    asked = [submission.params[0] for submission in service.submissions]
    assert [(one.echo, one.logprobs, one.prompt_logprobs) for one in asked] == [
        (False, None, 1)
    ] * 2
    assert "prompt_logprobs" not in (await chat(client)).json()


async def test_prompt_logprobs_beside_an_echo(
    client: httpx.AsyncClient, service: FakeService
) -> None:
    """The engine works out as many as either wants, and each is told its own."""
    echoed = dataclasses.replace(PROMPT, text="so")
    service.script = [delta("a", Finish.LENGTH, tokens=1, prompt=echoed)]
    asked = {"echo": True, "logprobs": 0, "prompt_logprobs": 1}
    (choice,) = (await complete(client, **asked)).json()["choices"]
    assert choice["text"] == "soa" and choice["prompt_logprobs"] == PROMPT_LOGPROBS
    assert choice["logprobs"]["top_logprobs"] == [None, None]
    assert service.submissions[0].params[0].prompt_logprobs == 1


async def test_scoring_alone(client: httpx.AsyncClient, service: FakeService) -> None:
    prompt = PromptText("so", TokenText(1, "s", b"s", math.nan), (score("o", -2.0),))
    service.script = [delta("", Finish.LENGTH, prompt=prompt)]
    asked = {"echo": True, "logprobs": 0, "max_tokens": 0}
    answer = (await complete(client, **asked)).json()
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("so", "length")
    assert choice["logprobs"]["token_logprobs"] == [None, -2.0]
    assert choice["logprobs"]["top_logprobs"] == [None, None]
    assert service.submissions[0].params[0].max_new_tokens == 0
    assert answer["usage"]["completion_tokens"] == 0


async def test_scores_of_prompts_are_bounded(
    client: httpx.AsyncClient, service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "MAX_PROMPT_SCORES", 3 * 4 * 5)  # the fake's prompts have 5
    asked = {"prompt": ["a", "b", "c"], "echo": True, "logprobs": 3, "max_tokens": 1}
    assert (await complete(client, **asked)).status_code == 200
    refused = await complete(client, **asked, n=2)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["param"] == "logprobs" and "30 prompt tokens" in error["message"]
    assert "the limit is 60" in error["message"]
    assert [each.aborts for each in service.generations] == [0] * 3 + [1] * 6
    unscored = {**asked, "logprobs": None, "n": 2}
    assert (await complete(client, **unscored)).status_code == 200


# Reasoning and tool calls


@pytest.fixture
def hermes(service: FakeService) -> FakeService:
    formats = Formats(ToolsFormat.HERMES, ReasoningFormat.QWEN3)
    service.card = dataclasses.replace(CARD, formats=formats)
    return service


async def test_reasoning(client: httpx.AsyncClient, hermes: FakeService) -> None:
    hermes.script = [
        delta("", tokens=1, reasoning="Hm", reasoning_tokens=1),
        delta("4", Finish.STOP, tokens=3, reasoning=".", reasoning_tokens=2),
    ]
    answer = (await chat(client)).json()
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "4")
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 2
    message, _ = message_of(chunks_of(await chat(client, stream=True)))
    assert message == {"role": "assistant", "content": "4", "reasoning_content": "Hm."}
    assert hermes.submissions[0].params[0].reasoning == ReasoningMarkers("<think>", "</think>")


@pytest.mark.parametrize("cut", [1, 3, 10_000])
async def test_calls(client: httpx.AsyncClient, hermes: FakeService, cut: int) -> None:
    hermes.script = texts(TWO_CALLS, cut)
    choice = (await chat(client, tools=TOOLS)).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me see."
    calls = choice["message"]["tool_calls"]
    told = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]
    assert told == [("weather", {"city": "Oslo"}), ("time", {})]
    assert len({call["id"] for call in calls}) == 2
    message, finishes = message_of(chunks_of(await chat(client, tools=TOOLS, stream=True)))
    assert finishes == ["tool_calls"] and message["content"] == "Let me see."
    for streamed, whole in zip(message["tool_calls"], calls, strict=True):
        assert streamed["function"] == whole["function"] and streamed["type"] == "function"
        assert streamed["id"].startswith("call_")
    assert hermes.submissions[0].prompt.template_kwargs["tools"] == TOOLS  # type: ignore[union-attr]


async def test_calls_alone_leave_null_content(
    client: httpx.AsyncClient, hermes: FakeService
) -> None:
    hermes.script = texts(TWO_CALLS.partition("\n")[2])
    message = (await chat(client, tools=TOOLS)).json()["choices"][0]["message"]
    assert message["content"] is None and len(message["tool_calls"]) == 2


async def test_no_more_than_one_call_where_parallel_calls_are_off(
    client: httpx.AsyncClient, hermes: FakeService
) -> None:
    hermes.script = texts(TWO_CALLS)[:-1]  # it would go on for ever
    asked = {"tools": TOOLS, "parallel_tool_calls": False}
    choice = (await chat(client, **asked)).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls" and len(choice["message"]["tool_calls"]) == 1
    message, finishes = message_of(chunks_of(await chat(client, **asked, stream=True)))
    assert finishes == ["tool_calls"] and len(message["tool_calls"]) == 1
    assert all(each.aborts for each in hermes.generations)


@pytest.mark.parametrize("tools", [{}, {"tools": TOOLS, "tool_choice": "none"}])
async def test_calls_are_content_where_none_is_allowed(
    client: httpx.AsyncClient, hermes: FakeService, tools: dict[str, Any]
) -> None:
    hermes.script = texts(TWO_CALLS)
    choice = (await chat(client, **tools)).json()["choices"][0]
    assert choice["message"]["content"] == TWO_CALLS and choice["finish_reason"] == "stop"
    assert "tool_calls" not in choice["message"]


async def test_a_call_that_must_come_is_made_by_a_grammar(
    client: httpx.AsyncClient, hermes: FakeService
) -> None:
    call = '[{"name": "weather", "arguments": {"city": "Oslo"}}]'
    hermes.script = texts(call)
    choice = (await chat(client, tools=TOOLS, tool_choice="required")).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Oslo"}'
    named = {"type": "function", "function": {"name": "weather"}}
    hermes.script = texts(call[1:-1])
    choice = (await chat(client, tools=TOOLS, tool_choice=named)).json()["choices"][0]
    assert choice["finish_reason"] == "stop"  # as at OpenAI
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "weather"
    required, one = (json.loads(each.constraint.spec.schema) for each in hermes.submissions)  # type: ignore
    assert required["type"] == "array" and len(required["items"]["anyOf"]) == 2
    assert one["properties"]["name"] == {"const": "weather"}
    assert one["properties"]["arguments"]["additionalProperties"] is False
    given = TOOLS[0]["function"]["parameters"]  # type: ignore[index]
    assert one["properties"]["arguments"].items() >= given.items()
    assert one["properties"]["arguments"]["$id"]  # the base of its references


# Structured output


@pytest.mark.parametrize(("asked", "spec"), [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, JsonObject()),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"a": 1}}}},
     JsonSchema('{"a": 1}')),
    ({"structured_outputs": {"json": '{"type": "string"}'}}, JsonSchema('{"type": "string"}')),
    ({"structured_outputs": {"regex": "a+", "json": None}}, Regex("a+")),
    ({"structured_outputs": {"choice": ["a", "b"]}}, Choice(("a", "b"))),
    ({"structured_outputs": {}}, None),
])  # fmt: skip
@pytest.mark.parametrize("ask", [chat, complete])
async def test_structured_output_is_asked_for(
    client: httpx.AsyncClient, service: FakeService, ask: Any, asked: dict[str, Any], spec: Any
) -> None:
    assert (await ask(client, **asked)).status_code == 200
    constraint = service.submissions[0].constraint
    assert (None if constraint is None else constraint.spec) == spec
    assert constraint is None or isinstance(constraint, Constraint)


async def test_a_thinking_budget_reaches_the_engine(
    client: httpx.AsyncClient, hermes: FakeService
) -> None:
    await chat(client, thinking_budget=5)
    assert hermes.submissions[0].params[0].thinking_budget == 5
    assert (await chat(client, thinking_budget=-1)).status_code == 400


@pytest.mark.parametrize("choice", [5, ["auto"], True])
async def test_a_tool_choice_of_the_wrong_type(client: httpx.AsyncClient, choice: Any) -> None:
    error = (await chat(client, tools=TOOLS, tool_choice=choice)).json()["error"]
    assert (error["param"], error["code"]) == ("tool_choice", "invalid_type")


async def test_choices_of_all_prompts_are_bounded(service: FakeService) -> None:
    transport = httpx.ASGITransport(
        create_app(service, dataclasses.replace(SETTINGS, max_choices=4))
    )
    async with httpx.AsyncClient(transport=transport, base_url="http://plait") as client:
        assert (await complete(client, prompt=["a", "b"], n=2)).status_code == 200
        refused = await complete(client, prompt=["a", "b"], n=3)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n")
        assert "6 choices; the limit is 4" in refused.json()["error"]["message"]
        assert (await chat(client, n=5)).status_code == 400
    assert len(service.submissions) == 2
