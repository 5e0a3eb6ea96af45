"""A whole server process over a fake engine: its start, its end, and its faults."""

import functools
import json
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from runtime.gil import is_free_threaded_build
from tests.server_process import SOON_S, ServerProcess, body, serving


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


def test_a_second_signal_ends_at_once() -> None:
    with serving(drain_timeout_s=600) as server:
        server.ready()
        with streaming(server, "endless"):
            server.process.send_signal(signal.SIGTERM)
            while httpx.get(f"{server.url}/health").json()["state"] != "draining":
                pass
            server.process.send_signal(signal.SIGINT)
            assert server.wait_exit() == 128 + signal.SIGINT


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
        name = {"http": "http-0"}.get(thread, thread)
        assert f"{name} thread" in said and "fakes_engine.py" in said
        assert ("InjectedFault" in said) == (fault == "crash")


def test_a_thread_that_freezes_the_interpreter_ends_the_server() -> None:
    """No Python code can run any more, the watch over the threads included.

    Without a GIL that is so once something stops all threads, as the report of the hang does; with
    one it is so at once, and the watch's first timer is the one that ends the process.
    """
    with serving(watchdog_s=1.0) as server:
        server.ready()
        with pytest.raises(httpx.HTTPError):
            server.ask("hello")
            server.ask("freeze engine")
            server.ask("hello")
        assert server.wait_exit() == 1
        limit_s = 8 if is_free_threaded_build() else 11
        assert f"Timeout (0:00:{limit_s:02})!" in server.all_said()


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


def test_a_prompt_that_cannot_be_encoded_fails_alone() -> None:
    with serving() as server:
        server.ready()
        for text in ("crash tokenizer", "panic"):
            failed = server.ask(text)
            assert failed.status_code == 500 and failed.json()["error"]["code"] == "internal_error"
        assert server.ask("hello").status_code == 200
        assert server.process.poll() is None


def test_loading_that_fails_ends_with_its_reason() -> None:
    with serving(error="config.json names no architecture") as server:
        assert server.wait_exit() == 1
        said = server.all_said()
        assert "config.json names no architecture" in said and "all_ended=True" in said
        assert "Traceback" not in said, "it is the model's fault, not ours"


def test_stacks_on_demand() -> None:
    """By a signal into the log, by an admin's request into the answer; the server goes on."""
    with serving() as server:
        server.ready()
        told = server.post("/debug/stacks", {})
        for thread in ("http-0", "engine", "detokenizer", "tokenizer-0", "monitor", "MainThread"):
            assert f"Thread {thread}:" in told.text
        server.process.send_signal(signal.SIGUSR1)
        server.wait_for("all threads:")
        assert server.ask("hello").status_code == 200
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_exit() == 0


def test_logs_for_programs() -> None:
    with serving(log_format="json") as server:
        server.ready()
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_exit() == 0
        lines = [line for line in server.all_said().splitlines() if not line.startswith("exit ")]
        told = [json.loads(line)["message"] for line in lines]
        assert any("is ready at" in each for each in told) and told[-1] == "ended"
