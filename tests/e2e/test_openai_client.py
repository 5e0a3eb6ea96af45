"""openai-python against a real server: its exception classes, types and streams.

The texts of a random byte-level model are mostly characters that never end, which is the hardest
case for whoever joins the parts of a stream.
"""

from typing import Any

import openai
import pytest

from tests.e2e.conftest import BODY_LIMIT, LIMIT
from tests.server_process import SOON_S, ServerProcess

MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]


@pytest.fixture
def client(tiny: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(api_key="none", base_url=f"{tiny.url}/v1", max_retries=0, timeout=SOON_S)


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0}, {"temperature": 1, "seed": 5}], ids=["greedy", "seeded"]
)
def test_streams_say_what_whole_answers_say(
    client: openai.OpenAI, sampling: dict[str, Any]
) -> None:
    for prompt in ("one", "two", "three", "four"):
        asked = {
            "model": "tiny", "messages": [{"role": "user", "content": prompt}], "max_tokens": 200,
            **sampling,
        }  # fmt: skip
        whole = client.chat.completions.create(**asked)
        with client.chat.completions.stream(
            stream_options={"include_usage": True}, **asked
        ) as stream:
            deltas = [event.delta for event in stream if event.type == "content.delta"]
            final = stream.current_completion_snapshot
        choice, streamed = whole.choices[0], final.choices[0]
        assert "".join(deltas) == streamed.message.content == choice.message.content
        assert streamed.message.role == "assistant"
        assert streamed.finish_reason == choice.finish_reason
        assert whole.usage is not None and final.usage is not None
        assert final.usage.completion_tokens == whole.usage.completion_tokens
        assert final.usage.total_tokens == whole.usage.total_tokens


def test_cached_tokens_are_told(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": "tell me once " * 20, "max_tokens": 2}
    first, second = (client.completions.create(**asked).usage for _ in range(2))
    assert first is not None and first.prompt_tokens == 260
    assert second is not None and second.prompt_tokens_details is not None
    assert second.prompt_tokens_details.cached_tokens == 256  # whole pages


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"


def test_errors_come_as_their_classes(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create
    with pytest.raises(openai.NotFoundError) as unknown:
        chat(model="other", messages=MESSAGES)
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as bad:
        chat(model="tiny", messages=MESSAGES, temperature=3)
    assert bad.value.param == "temperature" and "3" in str(bad.value)
    for stream in (False, True):
        long: list[Any] = [{"role": "user", "content": "x" * LIMIT}]
        with pytest.raises(
            openai.BadRequestError, match=f"maximum context length is {LIMIT} tokens"
        ) as too_long:
            chat(model="tiny", messages=long, stream=stream)
        assert too_long.value.code == "context_length_exceeded"
        assert too_long.value.request_id
    with pytest.raises(openai.APIStatusError) as too_large:
        chat(model="tiny", messages=[{"role": "user", "content": "x" * BODY_LIMIT}])
    assert too_large.value.status_code == 413
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="tiny", input="x")
    assert chat(model="tiny", messages=MESSAGES, max_tokens=1).choices
