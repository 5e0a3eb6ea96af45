"""What tests of several ranks ask of them, however they were started."""

import threading
import time
from collections.abc import Callable

import httpx

from tests.server_process import SOON_S, ServerProcess

GONE_S = 10.0  # the promise: no process of the job is left so long after one failed
TEXT = "/v1/completions"
FLAGS = ("--device", "cpu", "--max-kv-tokens", "8192", "--cpu-threads", "1", "--page-size", "16",
         "--prefill-budget", "1", "--drain-timeout-s", "60")  # fmt: skip
ASKED = (
    {"prompt": "hello", "temperature": 0, "logprobs": 2},
    {"prompt": "hello there", "temperature": 0.9, "seed": 5, "frequency_penalty": 1.0},
    {"prompt": "x" * 60, "temperature": 1.0, "seed": 6, "top_p": 0.9, "n": 2},
    {"prompt": "yes?", "temperature": 0, "structured_outputs": {"regex": "[ab]{8}"}},
    {"prompt": "hello", "temperature": 0, "echo": True, "logprobs": 1},
)


def answers(server: ServerProcess) -> list[list[str]]:
    """Greedy, seeded, with penalties, under a grammar, with logprobs."""
    told = []
    for more in ASKED:
        body = {"model": "tiny", "max_tokens": 12, **more}
        answer = server.post(TEXT, body).json()
        told.append([choice["text"] for choice in answer["choices"]])
    return told


class Stream:
    """A long answer, read on a thread of its own until it ends however it ends."""

    def __init__(self, server: ServerProcess, prompt: str, tokens: int) -> None:
        self._url = f"{server.url}{TEXT}"
        self._body = {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True,
                      "stream": True}  # fmt: skip
        self.events: list[str] = []
        self.is_broken = False
        self.begun = threading.Event()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        try:
            with httpx.stream("POST", self._url, json=self._body, timeout=SOON_S) as response:
                for line in response.iter_lines():
                    if line:
                        self.events.append(line)
                        self.begun.set()
        except httpx.HTTPError:
            self.is_broken = True
        self.begun.set()

    def has_failed(self) -> bool:
        """Whether its end, which is awaited, told of an error."""
        self._thread.join(SOON_S)
        assert not self._thread.is_alive()
        return self.is_broken or '"error"' in self.events[-1] or '"error"' in self.events[-2]


def wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
