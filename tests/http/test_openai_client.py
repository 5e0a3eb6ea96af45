"""openai-python as the strict client: its types, its accumulator, its exception classes."""

from collections.abc import AsyncIterator

import httpx2
import openai
import pytest

from engine.request import Finish
from httpd.app import create_app
from httpd.service import State
from tests.fakes_service import FakeService, context_refusal, delta
from tests.http.conftest import SETTINGS

pytestmark = pytest.mark.anyio

MODEL = "org/tiny-model"
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def client(service: FakeService) -> AsyncIterator[openai.AsyncOpenAI]:
    transport = httpx2.ASGITransport(create_app(service, SETTINGS))
    async with httpx2.AsyncClient(transport=transport) as http_client:
        yield openai.AsyncOpenAI(
            api_key="none", base_url="http://plait/v1", http_client=http_client, max_retries=0
        )


async def test_chat(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model=MODEL, messages=MESSAGES)
    assert answer.choices[0].message.content == "Hello!"
    assert answer.choices[0].message.tool_calls is None
    assert answer.usage and answer.usage.prompt_tokens_details
    assert answer.usage.prompt_tokens_details.cached_tokens == 2
    assert answer._request_id


async def test_accumulated_stream(client: openai.AsyncOpenAI) -> None:
    async with client.chat.completions.stream(
        model=MODEL, messages=MESSAGES, stream_options={"include_usage": True}
    ) as stream:
        deltas = [event.delta async for event in stream if event.type == "content.delta"]
        answer = await stream.get_final_completion()
    assert deltas == ["", "Hel", "lo", "!"]  # the first one came with the role
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == "Hello!"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage and answer.usage.total_tokens == 9


async def test_completions(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model=MODEL, prompt=[1, 2, 3])
    assert answer.choices[0].text == "Hello!"
    stream = await client.completions.create(model=MODEL, prompt="hi", stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "Hello!"


async def test_models(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == [MODEL]
    assert (await client.models.retrieve(MODEL)).id == MODEL


async def test_exception_classes(client: openai.AsyncOpenAI, service: FakeService) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        await client.chat.completions.create(model="other", messages=MESSAGES)
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as bad:
        await client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=9)
    assert bad.value.param == "temperature"
    service.refusal = context_refusal()
    with pytest.raises(openai.BadRequestError, match="maximum context length is 64 tokens"):
        await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
    service.current_state = State.LOADING
    with pytest.raises(openai.InternalServerError) as loading:
        await client.models.list()
    assert loading.value.status_code == 503


async def test_an_error_within_a_stream(client: openai.AsyncOpenAI, service: FakeService) -> None:
    service.script = [delta("Hel", tokens=1), delta(finish=Finish.ERROR, error="out of pages")]
    stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
    told: list[str | None] = []
    with pytest.raises(openai.APIError, match="out of pages"):
        async for chunk in stream:
            told.append(chunk.choices[0].delta.content)
    assert told == ["", "Hel"]


async def test_a_fault_of_ours_is_not_repeated(service: FakeService) -> None:
    service.refusal = RuntimeError("x")
    transport = httpx2.ASGITransport(create_app(service, SETTINGS))
    async with httpx2.AsyncClient(transport=transport) as http_client:
        client = openai.AsyncOpenAI(
            api_key="none", base_url="http://plait/v1", http_client=http_client, max_retries=2
        )
        with pytest.raises(openai.InternalServerError):
            await client.chat.completions.create(model=MODEL, messages=MESSAGES)
    assert len(service.submissions) == 1
