"""Clients that leave, and prompts that come again: sglang#36333, #4175, #27472, #24175; vllm#14326,
#18485, #5543, #7845, #54490.

Also tests/e2e/test_disconnect.py (every phase, over HTTP/1.1 and HTTP/2),
tests/engine/test_matrix.py (output against transformers, with hits and without) and
test_clients_that_come_and_go_change_nobodys_text in tests/e2e/test_server.py (sglang#24175).
"""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest

from tests.cases.asking import (
    CHAT,
    COMPLETIONS,
    Json,
    chat_body,
    complete,
    complete_text,
    completion_body,
    schema,
)
from tests.e2e.raw_client import WAYS, RawRequest
from tests.e2e.test_disconnect import wait_until
from tests.server_process import SOON_S, ServerProcess

ROWS = 8  # of the server
PROMISED_S = 2.0
ENDLESS: Json = {"max_tokens": 900, "ignore_eos": True, "temperature": 1}
LONG_ARRAY = schema({"type": "array", "items": {"type": "integer"}, "minItems": 500})


@pytest.fixture(autouse=True)
def rests_before_and_after(server: ServerProcess) -> Iterator[None]:
    server.wait_at_rest(SOON_S)
    yield
    server.wait_at_rest(PROMISED_S)


def test_three_streams_whose_clients_leave(server: ServerProcess) -> None:
    """sglang#36333: their rows and pages are back, and the log has nothing to say of it."""
    said = len(server.said) + server._lines.qsize()
    with ExitStack() as stack:
        left = []
        for number in range(3):
            body = chat_body(f"number {number}", stream=True, **ENDLESS)
            request = stack.enter_context(closing(RawRequest(server, CHAT, body, WAYS[0])))
            request.wait_text(b'"delta":{"content":"')
            left.append(request)
        for request in left:
            request.leave()
        print(f"at rest after {server.wait_at_rest(PROMISED_S):.3f} s")
    assert complete(server)["choices"]
    assert len(server.said) + server._lines.qsize() == said


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("more", [{}, LONG_ARRAY], ids=["free", "grammar"])
@pytest.mark.parametrize("way", [WAYS[1], WAYS[3]])
def test_all_choices_end_with_their_client(
    server: ServerProcess, way: str, more: Json, stream: bool
) -> None:
    """vllm#14326: while they decode."""
    body = completion_body("four of me", stream=stream, n=4, **{**ENDLESS, **more})
    with closing(RawRequest(server, COMPLETIONS, body, way)) as request:
        wait_until(server, requests=4, running=4)
        if stream:
            request.wait_text(b'"text":"')
        request.leave()
        server.wait_at_rest(PROMISED_S)


@pytest.mark.parametrize("more", [{}, LONG_ARRAY], ids=["free", "grammar"])
def test_all_choices_end_while_they_wait(server: ServerProcess, more: Json) -> None:
    """vllm#18485, #14326: before a step has named them; those that run go on."""
    with ExitStack() as stack:
        for number in range(ROWS):
            body = completion_body(f"row {number}", stream=True, **ENDLESS)
            other = stack.enter_context(closing(RawRequest(server, COMPLETIONS, body, WAYS[0])))
            other.wait_text(b'"text":"')
        body = completion_body("four of me", stream=True, n=4, **{**ENDLESS, **more})
        with closing(RawRequest(server, COMPLETIONS, body, WAYS[1])) as request:
            wait_until(server, requests=ROWS + 4, running=ROWS, waiting=4)
            request.leave()
            wait_until(server, requests=ROWS, running=ROWS, waiting=0)
    server.wait_at_rest(PROMISED_S)


@pytest.mark.parametrize("more", [{}, LONG_ARRAY], ids=["free", "grammar"])
def test_all_choices_end_at_once(server: ServerProcess, more: Json) -> None:
    """vllm#18485: perhaps before the prompt is encoded, or the grammar compiled."""
    for number in range(8):
        body = completion_body(f"{number}" * 200, n=4, **{**ENDLESS, **more})
        with closing(RawRequest(server, COMPLETIONS, body, WAYS[1])) as request:
            request.leave()
    server.wait_at_rest(SOON_S)


def cached_tokens(told: Json) -> int:
    count = told["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert isinstance(count, int)
    return count


LONG = "a prompt that is several pages long, so that its beginning can be found again; "
GREEDY: Json = {"max_tokens": 40, "ignore_eos": True}


@pytest.mark.parametrize("more", [{}, {"temperature": 1, "seed": 5}], ids=["greedy", "seeded"])
def test_a_prompt_from_the_cache_is_answered_as_ever(server: ServerProcess, more: Json) -> None:
    """vllm#5543, #7845, #54490, sglang#4175: whole, in part, and what was generated before."""
    asked = {**GREEDY, **more}
    salt = str(more)
    first = complete(server, LONG + "one", cache_salt=salt, **asked)
    assert cached_tokens(first) == 0
    again = complete(server, LONG + "one", cache_salt=salt, **asked)
    assert cached_tokens(again) > 0 and again["choices"] == first["choices"]
    ends = ("two", "", "and " + LONG, "one" + first["choices"][0]["text"])
    for number, end in enumerate(ends):
        alone = complete(server, LONG + end, cache_salt=f"{salt} {number}", **asked)
        shared = complete(server, LONG + end, cache_salt=salt, **asked)
        assert (cached_tokens(alone), cached_tokens(shared) > 0) == (0, True)
        assert shared["choices"] == alone["choices"]


def test_what_changes_the_cache_is_in_its_key(server: ServerProcess) -> None:
    """sglang#27472: of what changes KV there is only the salt here; embeddings are refused."""
    prompt = "salted " + LONG
    plain = complete(server, prompt, **GREEDY)
    salted = complete(server, prompt, cache_salt="a", **GREEDY)
    assert (cached_tokens(plain), cached_tokens(salted)) == (0, 0)
    assert cached_tokens(complete(server, prompt, cache_salt="b", **GREEDY)) == 0
    assert cached_tokens(complete(server, prompt, cache_salt="a", **GREEDY)) > 0
    assert cached_tokens(complete(server, prompt, **GREEDY)) > 0
    assert salted["choices"] == plain["choices"]
    for field in ("prompt_embeds", "audio", "lora_path"):
        response = server.post(COMPLETIONS, completion_body(prompt, **{field: "x"}))
        assert response.status_code == 400 and response.json()["error"]["param"] == field


def test_cancellations_change_nothing_in_the_cache(server: ServerProcess) -> None:
    """sglang#24175: requests that share beginnings, half of which are left in the middle."""
    prompts = [LONG + "x" * (number % 4) + str(number) for number in range(ROWS)]
    expected = [complete_text(server, each, cache_salt=each, **GREEDY) for each in prompts]
    got: dict[int, Any] = {}

    def stay(number: int) -> None:
        got[number] = complete_text(server, prompts[number], **GREEDY)

    threads = [threading.Thread(target=stay, args=(number,)) for number in range(ROWS)]
    for number, thread in enumerate(threads):
        body = completion_body(prompts[number], stream=True, **ENDLESS)
        with closing(RawRequest(server, COMPLETIONS, body, WAYS[1 + 2 * (number % 2)])) as leaver:
            thread.start()
            if number % 3:
                leaver.wait_text(b'"text":"')
            leaver.leave()
    for thread in threads:
        thread.join(SOON_S)
        assert not thread.is_alive()
    assert [got[number] for number in range(ROWS)] == expected
