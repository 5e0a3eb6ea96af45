"""What clients get wrong, sent to a real server while it serves others, who must not notice."""

import json
import re
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.checkpoints import VOCAB
from tests.e2e.conftest import BODY_LIMIT, LIMIT
from tests.server_process import SOON_S, ServerProcess, body, serving

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "hi"}
GOOD = {
    CHAT: {"model": "tiny", "messages": [USER], "max_tokens": 4},
    TEXT: {"model": "tiny", "prompt": "hi", "max_tokens": 4},
}

# (path, changed fields, status, param, code, words of the message)
Case = tuple[str, dict[str, Any], int, str, str, str]
CASES: list[Case] = [
    (TEXT, {"prompt": ""}, 400, "prompt", "empty_prompt", "empty"),
    (TEXT, {"prompt": []}, 400, "prompt", "empty_prompt", "empty"),
    (CHAT, {"messages": []}, 400, "messages", "empty_array", "at least 1"),
    (CHAT, {"messages": "hi"}, 400, "messages", "invalid_type", "an array"),
    (CHAT, {"messages": [{"role": "ghost", "content": "boo"}]}, 400, "messages[0].role",
     "invalid_value", "ghost"),
    (CHAT, {"messages": [{"role": "system", "content": "x"}]}, 400, "messages",
     "invalid_prompt", "this model takes no system message"),
    (TEXT, {"model": "gpt-9"}, 404, "model", "model_not_found", "gpt-9"),
    (TEXT, {"prompt": [1, VOCAB]}, 400, "prompt[1]", "invalid_token_id", f"{VOCAB} "),
    (TEXT, {"prompt": [-1]}, 400, "prompt[0]", "invalid_token_id", "-1"),
    (TEXT, {"prompt": [2**31]}, 400, "prompt[0]", "invalid_token_id", "2147483648"),
    (TEXT, {"stop_token_ids": [VOCAB]}, 400, "stop_token_ids[0]", "invalid_token_id", f"{VOCAB} "),
    (TEXT, {"logit_bias": {"191222": -100}}, 400, "logit_bias", "invalid_token_id", "191222"),
    (CHAT, {"logprobs": True, "top_logprobs": 10**6}, 400, "top_logprobs",
     "integer_above_max_value", "1000000"),
    (TEXT, {"max_tokens": -1}, 400, "max_tokens", "integer_below_min_value", "-1"),
    (TEXT, {"max_tokens": 0}, 400, "max_tokens", "integer_below_min_value", "minimum of 1"),
    (TEXT, {"max_tokens": 10**30}, 400, "max_tokens", "integer_above_max_value", "2147483647"),
    (TEXT, {"max_tokens": 2**31 - 1}, 400, "prompt", "context_length_exceeded",
     f"maximum context length is {LIMIT} tokens"),
    (TEXT, {"max_tokens": "4"}, 400, "max_tokens", "invalid_type", "an integer"),
    (TEXT, {"temperature": -0.5}, 400, "temperature", "decimal_below_min_value", "-0.5"),
    (TEXT, {"temperature": 1e300}, 400, "temperature", "decimal_above_max_value", "of 2"),
    (TEXT, {"temperature": [1]}, 400, "temperature", "invalid_type", "a number"),
    (TEXT, {"top_p": 1.5}, 400, "top_p", "decimal_above_max_value", "1.5"),
    (TEXT, {"top_k": -2}, 400, "top_k", "integer_below_min_value", "-2"),
    (TEXT, {"seed": 2**64}, 400, "seed", "integer_above_max_value", "9223372036854775807"),
    (TEXT, {"stop": ["x"] * 100}, 400, "stop", "array_above_max_length", "100"),
    (CHAT, {"n": 10**9}, 400, "n", "integer_above_max_value", "1000000000"),
    (CHAT, {"stream": "yes"}, 400, "stream", "invalid_type", "a boolean"),
    (CHAT, {"stream_options": {"include_usage": True}}, 400, "stream_options",
     "unsupported_value", "stream"),
]  # fmt: skip

BODIES: dict[str, tuple[bytes, int, str]] = {
    "empty": (b"", 400, "EOF"),
    "cut": (b'{"model": "tiny", "prompt": "h', 400, "EOF"),
    "NaN": (b'{"model":"tiny","prompt":"hi","temperature":NaN}', 400, "expected value"),
    "Infinity": (b'{"model":"tiny","prompt":"hi","temperature":Infinity}', 400, "expected value"),
    "-Infinity": (b'{"model":"tiny","prompt":"hi","top_p":-Infinity}', 400, "invalid number"),
    "1e999": (b'{"model":"tiny","prompt":"hi","temperature":1e999}', 400, "temperature"),
    "array": (b'["tiny"]', 400, "JSON object"),
    "bad UTF-8": (b'{"model":"tiny","prompt":"\xff"}', 400, "unicode"),
    "deep": (b'{"a":' * 5000 + b"1" + b"}" * 5000, 400, "recursion limit"),
    "too large": (b'{"model":"tiny","prompt":"' + b"x" * BODY_LIMIT, 413, str(BODY_LIMIT)),
}


class Neighbour:
    """Asks the same again and again beside the bad requests. Owned by the test's thread."""

    asked = {**GOOD[TEXT], "prompt": "neighbour", "max_tokens": 50, "temperature": 0,
             "ignore_eos": True, "stream": True}  # fmt: skip

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._ask_again)
        self.texts = [self._ask()]  # what it is told, the first time alone

    def _ask(self) -> str:
        events = self._server.post(TEXT, self.asked).text.split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""], events
        chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
        return "".join(chunk["choices"][0]["text"] for chunk in chunks)

    def _ask_again(self) -> None:
        while not self._stop.is_set():
            self.texts.append("failed")
            self.texts[-1] = self._ask()

    def __enter__(self) -> "Neighbour":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(SOON_S)
        assert not self._thread.is_alive()


@pytest.fixture(scope="module")
def undisturbed(tiny: ServerProcess) -> Iterator[ServerProcess]:
    """The server, with a neighbour who must be told the same all the time."""
    with Neighbour(tiny) as neighbour:
        yield tiny
    print(f"the neighbour asked {len(neighbour.texts)} times")
    assert len(neighbour.texts) > 2 and set(neighbour.texts) == {neighbour.texts[0]}
    tiny.wait_at_rest()


def refusal(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    return dict(error)


def assert_served(server: ServerProcess) -> None:
    answer = server.post(TEXT, {**GOOD[TEXT], "max_tokens": 1})
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize(("path", "wrong", "status", "param", "code", "words"), CASES)
def test_a_bad_value(
    undisturbed: ServerProcess, path: str, wrong: dict[str, Any],
    status: int, param: str, code: str, words: str,
) -> None:  # fmt: skip
    error = refusal(undisturbed.post(path, {**GOOD[path], **wrong}), status)
    assert (error["param"], error["code"]) == (param, code), error
    assert words in error["message"]
    assert_served(undisturbed)


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("http2", [False, True], ids=["HTTP/1.1", "HTTP/2"])
def test_a_bad_body(undisturbed: ServerProcess, name: str, http2: bool) -> None:
    body, status, words = BODIES[name]
    with httpx.Client(http1=not http2, http2=http2, timeout=SOON_S) as client:
        response = client.post(f"{undisturbed.url}{TEXT}", content=body)
        assert words in refusal(response, status)["message"]
        again = client.post(f"{undisturbed.url}{TEXT}", json={**GOOD[TEXT], "max_tokens": 1})
        assert again.status_code == 200


@pytest.mark.parametrize("header", [b"x: " + b"a" * (1 << 20), b"x: a\r\n" * (1 << 17)])
def test_headers_of_a_megabyte(undisturbed: ServerProcess, header: bytes) -> None:
    """They end their own connection: CVE-2025-48956."""
    with undisturbed.connect() as peer:
        peer.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n" + header + b"\r\n\r\n")
        come = b""
        while part := peer.recv(1 << 16):
            come += part
    assert come.startswith(b"HTTP/1.1 431 ")
    error = json.loads(come.partition(b"\r\n\r\n")[2])["error"]
    assert error["code"] == "headers_too_large"
    assert re.search(r"headers have at least \d+ bytes; the limit is 16384", error["message"])
    assert_served(undisturbed)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("room", [1, 0, -1], ids=["L-1", "L", "L+1"])
def test_prompts_as_long_as_the_context(
    undisturbed: ServerProcess, room: int, stream: bool
) -> None:
    """The refusal comes as a 400 where the answer would have been a stream, too."""
    asked = {"model": "tiny", "prompt": [97] * (LIMIT - room), "stream": stream}
    for given in ({"max_tokens": 1}, {}):
        answer = undisturbed.post(TEXT, {**asked, **given, "ignore_eos": True})
        if room == 1:
            assert answer.status_code == 200 and '"finish_reason":"length"' in answer.text
            continue
        error = refusal(answer, 400)
        assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
        assert f"maximum context length is {LIMIT} tokens" in error["message"]


def test_no_check_goes_with_the_asserts(monkeypatch: pytest.MonkeyPatch) -> None:
    """CVE-2026-41523: `python -O` leaves out asserts, and no input may be checked by one."""
    monkeypatch.setenv("PYTHONOPTIMIZE", "1")
    with serving() as server:
        server.ready()
        for asked in ({"prompt": ""}, {"prompt": [1, 256]}, {"n": 1000}, {"temperature": 9},
                      {"stop_token_ids": [256]}, {"prompt": "x" * 5000}):  # fmt: skip
            response = server.post(TEXT, {**body("x"), **asked})
            refusal(response, 400)
        assert server.ask("abc").status_code == 200
        server.end_clean()
