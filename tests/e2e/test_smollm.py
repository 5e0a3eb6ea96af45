"""A real model and the clients that people use: curl and openai-python."""

import json
import subprocess
from typing import Any

import openai
import pytest

from tests.server_process import SOON_S, ServerProcess

pytestmark = pytest.mark.model

MODEL = "SmolLM2-135M-Instruct"
PARIS = "The capital of France is Paris."
QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
SEA = "Write a short poem about the sea."


@pytest.fixture
def client(smollm: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(api_key="none", base_url=f"{smollm.url}/v1", max_retries=0, timeout=SOON_S)


@pytest.mark.parametrize(
    ("flag", "version", "stream"),
    [("--http1.1", "1.1", True), ("--http2-prior-knowledge", "2", False)],
)
def test_curl(smollm: ServerProcess, flag: str, version: str, stream: bool) -> None:
    request = {"model": MODEL, "messages": QUESTION, "temperature": 0, "stream": stream}
    said = subprocess.run(
        ["curl", "-sS", flag, "--max-time", str(SOON_S), f"{smollm.url}/v1/chat/completions",
         "-H", "content-type: application/json", "-d", json.dumps(request),
         "-w", "\n%{http_version} %{http_code} %{content_type}"],
        check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    answer, _, told = said.rpartition("\n")
    if stream:
        assert told == f"{version} 200 text/event-stream; charset=utf-8"
        *events, done, last = answer.split("\n\n")
        assert (done, last) == ("data: [DONE]", "")
        choices = [json.loads(e.removeprefix("data: "))["choices"][0] for e in events]
        assert "".join(choice["delta"].get("content", "") for choice in choices) == PARIS
        assert choices[-1]["finish_reason"] == "stop"
    else:
        assert told == f"{version} 200 application/json"
        assert json.loads(answer)["choices"][0]["message"]["content"] == PARIS


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0)
    assert answer.choices[0].message.content == PARIS
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (37, 8)


def test_a_second_turn(client: openai.OpenAI) -> None:
    turns = [
        *QUESTION,
        {"role": "assistant", "content": PARIS},
        {"role": "user", "content": [{"type": "text", "text": "And of Italy?"}]},
    ]
    answer = client.chat.completions.create(model=MODEL, messages=turns, temperature=0)
    assert "Rome" in (answer.choices[0].message.content or "")


def poem(client: openai.OpenAI, **more: Any) -> tuple[str, str, int]:
    """Text, finish reason and tokens of a greedy answer; the same streamed and not."""
    asked: dict[str, Any] = {
        "model": MODEL, "messages": [{"role": "user", "content": SEA}], "max_tokens": 24, **more
    }  # fmt: skip
    whole = client.chat.completions.create(temperature=0, **asked)
    text, usage = whole.choices[0].message.content, whole.usage
    assert text is not None and usage is not None
    with client.chat.completions.stream(
        temperature=0, stream_options={"include_usage": True}, **asked
    ) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.current_completion_snapshot  # the final one raises for "length"
    assert "".join(deltas) == text == (final.choices[0].message.content or "")
    assert final.choices[0].finish_reason == whole.choices[0].finish_reason
    assert final.usage is not None
    assert final.usage.completion_tokens == usage.completion_tokens
    assert final.usage.prompt_tokens == usage.prompt_tokens
    return text, whole.choices[0].finish_reason, usage.completion_tokens


def test_stop_strings_within_and_across_tokens(client: openai.OpenAI) -> None:
    """Each cut of the text that spans a word's end: its tokens hold more than the stop string."""
    text, reason, tokens = poem(client)
    assert (reason, tokens) == ("length", 24)
    for start, length in [(3, 4), (41, 9), (60, 15)]:
        stop = text[start : start + length]
        cut, reason, fewer = poem(client, stop=["never said", stop])
        assert cut == text[: text.index(stop)]
        assert reason == "stop" and fewer < tokens
    # The beginning of a stop string at the very end is held back, and told in the end.
    assert poem(client, stop=[text[-5:] + "?!"]) == (text, "length", tokens)


def test_completions(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "prompt": "One, two, three,", "temperature": 0}
    whole = client.completions.create(**asked)
    assert whole.choices[0].text.startswith(" four")
    assert whole.usage is not None and whole.usage.completion_tokens == 16
    parts = list(client.completions.create(stream=True, **asked))
    assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text


def test_a_seed_repeats_itself_and_others_differ(client: openai.OpenAI) -> None:
    def say(seed: int) -> str:
        answer = client.completions.create(
            model=MODEL, prompt="My favourite", max_tokens=6, temperature=1, seed=seed
        )
        return answer.choices[0].text

    assert say(1) == say(1)
    assert len({say(seed) for seed in range(3)}) > 1
