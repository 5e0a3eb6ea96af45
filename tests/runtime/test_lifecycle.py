"""A whole server process over a fake engine: its start, its end, and its faults."""

import functools
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

ROOT = Path(__file__).resolve().parents[2]
SOON_S = 20.0  # far more than anything here takes, on a busy machine too


class ServerProcess:
    """A `tests.fake_server` and what it has said so far."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.fake_server", json.dumps(settings)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHON_GIL": "0", "OMP_NUM_THREADS": "1"},
        )
        self.said: list[str] = []
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self.url = self.wait_for(r"loading .*; (http\S+)/health")

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def wait_for(self, pattern: str) -> str:
        """The first line that matches, or its group."""
        deadline = time.monotonic() + SOON_S
        while time.monotonic() < deadline:
            line = self._lines.get(timeout=SOON_S)
            if line is None:
                break
            self.said.append(line)
            if found := re.search(pattern, line):
                return found.group(found.lastindex or 0)
        raise AssertionError(f"never said {pattern!r}:\n{self.all_said()}")

    def ready(self) -> "ServerProcess":
        self.wait_for("is ready at")
        return self

    def wait_exit(self) -> int:
        return self.process.wait(SOON_S)

    def all_said(self) -> str:
        """Everything, once the process has ended."""
        self._reader.join(SOON_S)
        while not self._lines.empty():
            line = self._lines.get()
            if line is not None:
                self.said.append(line)
        return "".join(self.said)

    def ask(self, text: str, **more: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/completions", json=body(text, **more), timeout=SOON_S)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(SOON_S)
        self._reader.join(SOON_S)
        assert not self._reader.is_alive()
        assert self.process.stdout is not None
        self.process.stdout.close()


def body(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "fake", "prompt": text, "max_tokens": 8, **more}


@contextmanager
def serving(**settings: Any) -> Iterator[ServerProcess]:
    server = ServerProcess(settings)
    try:
        yield server
    finally:
        server.close()


@contextmanager
def streaming(server: ServerProcess, text: str) -> Iterator[Iterator[str]]:
    """The lines of a stream that has begun and would not end by itself for long."""
    with httpx.stream(
        "POST",
        f"{server.url}/v1/completions",
        json=body(text, stream=True, max_tokens=1000),
        timeout=SOON_S,
    ) as response:
        assert response.status_code == 200
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        yield lines


def test_the_gate_opens_only_when_all_is_loaded(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with serving(gate=str(gate)) as server:
        health = httpx.get(f"{server.url}/health", timeout=SOON_S)
        assert health.status_code == 200 and health.json()["state"] == "loading"
        for refused in (server.ask("hello"), httpx.get(f"{server.url}/ready", timeout=SOON_S)):
            assert refused.status_code == 503 and "retry-after" in refused.headers
        gate.touch()
        server.ready()
        assert httpx.get(f"{server.url}/ready", timeout=SOON_S).status_code == 200
        answer = server.ask("hello")
        assert answer.json()["choices"][0]["text"] == "hellohel"
        assert "server" not in answer.headers
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_exit() == 0
        assert "exit 0 all_ended=True left=['MainThread']" in server.all_said()


def test_sigterm_while_loading_ends_at_once(tmp_path: Path) -> None:
    with serving(gate=str(tmp_path / "never")) as server:
        server.wait_for("waiting for the gate")
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_exit() == 0
        assert "all_ended=True" in server.all_said()


def test_drain_lets_requests_end_and_takes_no_new_ones() -> None:
    with serving(drain_timeout_s=SOON_S) as server, httpx.Client(timeout=SOON_S) as client:
        server.ready()
        with streaming(server, "slow") as lines:
            server.process.send_signal(signal.SIGTERM)
            state = "ready"
            while state == "ready":
                state = client.get(f"{server.url}/health").json()["state"]
            assert state == "draining"
            refused = client.post(f"{server.url}/v1/completions", json=body("late"))
            assert refused.status_code == 503 and refused.json()["error"]["code"] == "draining"
            events = [line for line in lines if line]
        assert events[-1] == "data: [DONE]" and '"finish_reason":"length"' in events[-2]
        assert server.wait_exit() == 0


def test_what_does_not_end_in_the_drain_time_is_aborted_and_told() -> None:
    with serving(drain_timeout_s=0.2) as server:
        server.ready()
        with streaming(server, "endless") as lines:
            server.process.send_signal(signal.SIGTERM)
            events = [line for line in lines if line]
        assert '"code":"aborted"' in events[-1]
        assert server.wait_exit() == 0
        assert "1 requests did not end in time" in server.all_said()


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_at_once(second: signal.Signals) -> None:
    with serving(drain_timeout_s=600) as server:
        server.ready()
        with streaming(server, "endless"):
            server.process.send_signal(signal.SIGTERM)
            while httpx.get(f"{server.url}/health").json()["state"] != "draining":
                pass
            server.process.send_signal(second)
            assert server.wait_exit() == 128 + second


def test_an_idle_connection_does_not_hold_up_the_end() -> None:
    with serving() as server, httpx.Client() as client:
        server.ready()
        assert client.get(f"{server.url}/health").status_code == 200
        began = time.monotonic()
        server.process.send_signal(signal.SIGINT)
        assert server.wait_exit() == 0
        assert time.monotonic() - began < 4


@pytest.mark.parametrize("thread", ["engine", "detokenizer", "http"])
@pytest.mark.parametrize("fault", ["crash", "hang"])
def test_a_fault_in_a_thread_ends_the_server(fault: str, thread: str) -> None:
    """Open streams are told, the stack is in the log, and the exit code is not 0."""
    with serving(watchdog_s=1.0) as server:
        server.ready()
        with streaming(server, "endless") as lines, httpx.Client() as client:
            provoke = functools.partial(
                client.post, f"{server.url}/v1/completions", json=body(f"{fault} {thread}"),
                timeout=SOON_S,
            )  # fmt: skip
            if (fault, thread) == ("hang", "http"):  # a loop that hangs can tell nobody
                with pytest.raises(httpx.HTTPError):
                    provoke()
            else:
                assert provoke().status_code >= 500
                events = [line for line in lines if line]
                assert '"error"' in events[-1]
        assert server.wait_exit() == 1
        said = server.all_said()
        assert f"{thread} thread" in said and "fakes_engine.py" in said
        assert ("InjectedFault" in said) == (fault == "crash")


def test_a_fault_in_a_tokenizer_thread_ends_the_server() -> None:
    with serving(watchdog_s=1.0) as server:
        server.ready()
        assert server.ask("exit tokenizer").status_code == 503
        assert server.wait_exit() == 1
        assert "SystemExit" in server.all_said()


def test_a_hang_in_a_tokenizer_thread_ends_the_server() -> None:
    with serving(watchdog_s=1.0) as server:
        server.ready()
        assert server.ask("hang tokenizer").status_code == 503
        assert server.wait_exit() == 1
        assert "the tokenizer-0 thread hangs" in server.all_said()


@pytest.mark.parametrize("text", ["crash tokenizer", "panic"])
def test_a_prompt_that_cannot_be_encoded_fails_alone(text: str) -> None:
    with serving() as server:
        server.ready()
        failed = server.ask(text)
        assert failed.status_code == 500 and failed.json()["error"]["code"] == "internal_error"
        assert server.ask("hello").status_code == 200
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_exit() == 0


def test_loading_that_fails_ends_with_its_reason() -> None:
    with serving(error="config.json names no architecture") as server:
        assert server.wait_exit() == 1
        said = server.all_said()
        assert "config.json names no architecture" in said and "all_ended=True" in said
        assert "Traceback" not in said, "it is the model's fault, not ours"
