"""Clients that leave in every phase of a request: what they held is back within a second."""

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import pytest

from tests.e2e.conftest import LIMIT
from tests.e2e.raw_client import WAYS, RawRequest
from tests.server_process import SOON_S, ServerProcess

CHAT = "/v1/chat/completions"
ROWS = 8  # of the server


def endless(*, prompt_chars: int = 8, stream: bool = True) -> dict[str, Any]:
    """A request that would run for many seconds."""
    return {
        "model": "tiny", "messages": [{"role": "user", "content": "a" * prompt_chars}],
        "stream": stream, "ignore_eos": True,
    }  # fmt: skip


def wait_until(server: ServerProcess, **wanted: int) -> None:
    for _ in range(10_000):
        told = server.occupancy()
        if wanted.items() <= told.items():
            return
    raise AssertionError(f"never {wanted}: {told}")


@contextmanager
def busy(server: ServerProcess, requests: int) -> Iterator[None]:
    """So many rows are taken by others, whose streams go on undisturbed."""
    with ExitStack() as stack:
        for _ in range(requests):
            other = RawRequest(server, CHAT, endless(), WAYS[0])
            stack.enter_context(closing(other))
            other.wait_text(b'"content":"')
        wait_until(server, requests=requests, running=requests)
        yield
        told = server.occupancy()
        assert (told["requests"], told["running"]) == (requests, requests), told


@pytest.fixture(autouse=True)
def rests_before_and_after(tiny: ServerProcess) -> Iterator[None]:
    tiny.wait_at_rest(SOON_S)
    yield
    tiny.wait_at_rest()


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("way", WAYS)
def test_while_it_decodes(tiny: ServerProcess, way: str, stream: bool) -> None:
    leaver = RawRequest(tiny, CHAT, endless(stream=stream), way)
    with closing(leaver):
        if stream:
            leaver.wait_text(b'"delta":{"content":"')
        wait_until(tiny, requests=1, running=1)
        leaver.leave()
        print(f"at rest after {tiny.wait_at_rest():.3f} s")


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("way", WAYS)
def test_while_its_prompt_is_computed(tiny: ServerProcess, way: str, stream: bool) -> None:
    """A slow client may leave a fast server too late: then it tries again with a new prompt."""
    chars = LIMIT - 1000
    for attempt in range(10):
        body = endless(prompt_chars=chars, stream=stream)
        # New each time: a prompt that the cache holds would be computed at once.
        new = f"{attempt}{way}{stream}"
        body["messages"][0]["content"] = new + body["messages"][0]["content"]
        leaver = RawRequest(tiny, CHAT, body, way)
        with closing(leaver):
            wait_until(tiny, requests=1, running=1)
            leaver.leave()
            print(f"at rest after {tiny.wait_at_rest():.3f} s")
        again = {**body, "max_tokens": 1, "stream": False}
        usage = tiny.post(CHAT, again).json()["usage"]
        if usage["prompt_tokens_details"]["cached_tokens"] < chars:
            return  # the cache has not seen the whole of the prompt: it was left before its end
    raise AssertionError("each prompt was computed before its client could leave")


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("way", WAYS)
def test_while_it_waits_for_a_row(tiny: ServerProcess, way: str, stream: bool) -> None:
    with busy(tiny, ROWS):
        leaver = RawRequest(tiny, CHAT, endless(stream=stream), way)
        with closing(leaver):
            wait_until(tiny, requests=ROWS + 1, running=ROWS, waiting=1)
            leaver.leave()
            wait_until(tiny, requests=ROWS, running=ROWS, waiting=0)


@pytest.mark.parametrize("way", WAYS)
def test_at_once(tiny: ServerProcess, way: str) -> None:
    """Before the server may have read a word, let alone encoded the prompt."""
    for _ in range(20):
        leaver = RawRequest(tiny, CHAT, endless(), way)
        with closing(leaver):
            leaver.leave()
    tiny.wait_at_rest(SOON_S)  # twenty prompts are to be encoded before the last can be aborted


def test_one_that_leaves_changes_nothing_for_its_neighbours(tiny: ServerProcess) -> None:
    asked = {**endless(stream=False), "temperature": 0, "max_tokens": 100}
    alone = tiny.post(CHAT, asked).json()["choices"]
    with ExitStack() as stack:
        leavers = []
        for way in WAYS:
            leaver = stack.enter_context(closing(RawRequest(tiny, CHAT, endless(), way)))
            leaver.wait_text(b'"content":"')
            leavers.append(leaver)
        for leaver in leavers:
            leaver.leave()
            assert tiny.post(CHAT, asked).json()["choices"] == alone
