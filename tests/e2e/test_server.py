"""The real server over a small random checkpoint, from flags to exit code."""

import asyncio
import json
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.checkpoints import build_checkpoint, save_tokenizer
from tests.server_process import SOON_S, ServerProcess, serving_model

CLIENTS, ROUNDS = 24, 6
PROMPTS = [f"{word} and some more text {n}" for n, word in enumerate(["one", "two", "three"] * 3)]
TOKENS = 24


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = build_checkpoint(tmp_path_factory.mktemp("checkpoints") / "tiny")
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[ServerProcess]:
    """Few rows and few pages, so that requests wait, are evicted and retracted."""
    # One thread: two would wait for each other whenever the tests' machine is busy.
    flags = "--page-size 4 --max-running 8 --max-kv-tokens 320 --max-model-len 128"
    flags += " --prefill-budget 16 --cpu-threads 1"
    with serving_model(checkpoint, *flags.split()) as server:
        yield server.ready()


def completion(prompt: str, **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, **more}


async def stream(client: httpx.AsyncClient, prompt: str, patience: int) -> tuple[str, bool]:
    """The text that came, and whether it was all."""
    text = ""
    request = completion(prompt, stream=True)
    async with client.stream("POST", "/v1/completions", json=request) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                return text, True
            if line:
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                text += event["choices"][0]["text"]
                patience -= 1
            if patience < 0:
                break
    return text, False


async def visit(client: httpx.AsyncClient, dice: random.Random, expected: dict[str, str]) -> int:
    """Asks again and again, and leaves half of the time; how often it stayed to the end."""
    stayed = 0
    for _ in range(ROUNDS):
        prompt = dice.choice(PROMPTS)
        patience = dice.choice([10**9, dice.randrange(TOKENS)])
        asking = asyncio.ensure_future(stream(client, prompt, patience))
        if dice.random() < 0.3:
            await asyncio.sleep(dice.random() * 0.02)
            asking.cancel()
        try:
            text, is_all = await asking
        except asyncio.CancelledError:
            continue
        assert expected[prompt].startswith(text)
        assert text == expected[prompt] or not is_all
        stayed += is_all
    return stayed


@pytest.mark.parametrize("http2", [False, True], ids=["HTTP/1.1", "HTTP/2"])
def test_clients_that_come_and_go_change_nobodys_text(server: ServerProcess, http2: bool) -> None:
    with httpx.Client(base_url=server.url, timeout=SOON_S) as alone:
        expected = {
            prompt: alone.post("/v1/completions", json=completion(prompt)).json()["choices"][0][
                "text"
            ]
            for prompt in PROMPTS
        }
    assert len(set(expected.values())) == len(PROMPTS)

    async def main() -> list[int]:
        client = httpx.AsyncClient(
            base_url=server.url, http1=not http2, http2=http2, timeout=SOON_S
        )
        async with client:
            # httpcore (1.0) miscounts a connection's streams when its first request is cancelled.
            await client.get("/health")
            visits = (visit(client, random.Random(seed), expected) for seed in range(CLIENTS))
            return await asyncio.gather(*visits)

    stayed = asyncio.run(asyncio.wait_for(main(), 60))
    assert sum(stayed) >= CLIENTS


def test_what_cannot_fit_is_refused_before_the_engine(server: ServerProcess) -> None:
    ask = httpx.Client(base_url=server.url, timeout=SOON_S).post
    for prompt_tokens, tokens, status in [
        (127, 1, 200),
        (127, 2, 400),
        (128, 1, 400),
        (1, 127, 200),
    ]:
        answer = ask("/v1/completions", json=completion("x" * prompt_tokens, max_tokens=tokens))
        assert answer.status_code == status
        if status == 400:
            assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_a_chat_by_the_checkpoints_template(server: ServerProcess) -> None:
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=chat, timeout=SOON_S).json()
    assert answer["usage"]["completion_tokens"] <= 3
    assert answer["choices"][0]["message"]["role"] == "assistant"


def test_it_ends_cleanly_with_every_page_accounted_for(server: ServerProcess) -> None:
    """The engine thread checks its own books as the last thing it does. Must stay the last test."""
    server.process.send_signal(signal.SIGTERM)
    assert server.wait_exit() == 0
    said = server.all_said()
    assert "ended" in said and "Traceback" not in said and "ERROR" not in said, said
