"""A server as a process of its own, for tests of its start, its end and its sockets."""

import json
import os
import queue
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[1]
SOON_S = 20.0  # far more than anything here takes, on a busy machine too
START_S = 150.0  # likewise, where torch is imported and a model loaded
REST_S = 1.0  # the promise: what a client held is back so soon after it has gone


class ServerProcess:
    """A server and what it has said so far."""

    def __init__(
        self, module: str, *arguments: str, environ: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHON_GIL": "0", "OMP_NUM_THREADS": "1", **environ},
        )
        self.said: list[str] = []
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        try:
            self.url = self.wait_for(r"loading .*; (http\S+)/health", START_S)
        except BaseException:  # nobody has it yet who would close it
            self.close()
            raise

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def wait_for(self, pattern: str, timeout_s: float = SOON_S) -> str:
        """The first line that matches, or its group."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            line = self._lines.get(timeout=timeout_s)
            if line is None:
                break
            self.said.append(line)
            if found := re.search(pattern, line):
                return found.group(found.lastindex or 0)
        raise AssertionError(f"never said {pattern!r}:\n{self.all_said()}")

    def ready(self) -> "ServerProcess":
        self.wait_for("is ready at", START_S)
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

    def occupancy(self) -> dict[str, int]:
        """What requests hold, by /health."""
        told = self.get("/health").json()["occupancy"]
        assert isinstance(told, dict), told
        return told

    def wait_at_rest(self, limit_s: float = REST_S) -> float:
        """Seconds until no request holds a row or a page."""
        began_s = time.monotonic()
        while True:
            told, now_s = self.occupancy(), time.monotonic()
            held = [told["requests"], told["running"], told["waiting"]]
            if not any(held) and told["available_pages"] == told["total_pages"]:
                return now_s - began_s
            assert now_s - began_s < limit_s, told

    def ask(self, text: str, **more: Any) -> httpx.Response:
        return self.post("/v1/completions", body(text, **more))

    # Without verification, even where there is no TLS: loading the certificates takes 50 ms.

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", timeout=SOON_S, verify=False)

    def post(self, path: str, asked: dict[str, Any]) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=asked, timeout=SOON_S, verify=False)

    def connect(self) -> socket.socket:
        """A connection on which nothing was said."""
        host, port = self.url.rpartition("/")[2].split(":")
        return socket.create_connection((host, int(port)), timeout=SOON_S)

    def end_clean(self) -> None:
        """Ends it; it must have run until now, and have had nothing to complain of."""
        assert self.process.poll() is None, self.all_said()
        self.process.terminate()
        assert self.wait_exit() == 0
        said = self.all_said()
        assert "Traceback" not in said and "ERROR" not in said, said

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
    """A server over a fake engine; see tests.fake_server for `settings`."""
    with serving_module("tests.fake_server", json.dumps(settings)) as server:
        yield server


@contextmanager
def serving_model(folder: Path, *flags: str) -> Iterator[ServerProcess]:
    """The real server over a checkpoint; with one compute thread, unless `flags` say more.

    Two threads wait for each other at every operation whenever the tests' machine is busy.
    """
    arguments = ["--model", str(folder), "--port", "0", "--cpu-threads", "1", *flags]
    with serving_module("runtime.serve", *arguments) as server:
        yield server


@contextmanager
def serving_module(module: str, *arguments: str) -> Iterator[ServerProcess]:
    """`python -m module`, which says what a server says; it is killed where it still runs."""
    server = ServerProcess(module, *arguments)
    try:
        yield server
    finally:
        server.close()
