"""Whole lives of real servers: loading, TLS, torchrun, signals, and an engine that fails."""

import asyncio
import json
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from h2.errors import ErrorCodes

from tests.server_process import SOON_S, ServerProcess, serving, serving_model, serving_module

TEXT = "/v1/completions"
TLS = Path(__file__).parents[1] / "runtime" / "tls"
FLAGS = ("--max-kv-tokens", "16384")


def asked(tokens: int, **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "hello", "max_tokens": tokens, "ignore_eos": True, **more}


@contextmanager
def streaming(server: ServerProcess, tokens: int) -> Iterator[Iterator[str]]:
    """The events of a stream that has begun."""
    body = asked(tokens, stream=True)
    with httpx.stream(
        "POST", f"{server.url}{TEXT}", json=body, timeout=SOON_S, verify=False
    ) as response:
        assert response.status_code == 200
        events = (line for line in response.iter_lines() if line)
        assert "choices" in next(events)
        yield events


def curl(server: ServerProcess, *flags: str) -> str:
    """HTTP version and status of an answer of 4 tokens, over a connection that is verified."""
    said = subprocess.run(
        ["curl", "-sS", "--max-time", str(SOON_S), "--cacert", TLS / "cert.pem", *flags,
         "-d", json.dumps(asked(4)), "-w", "\n%{http_version} %{http_code}",
         server.url.replace("127.0.0.1", "localhost") + TEXT],
        check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    answer, _, told = said.rpartition("\n")
    assert json.loads(answer)["usage"]["completion_tokens"] == 4
    return told


def test_tls_from_the_gate_to_the_drain(checkpoint: Path) -> None:
    tls = ("--tls-cert", str(TLS / "cert.pem"), "--tls-key", str(TLS / "key.pem"))
    with serving_model(checkpoint, *FLAGS, *tls) as server:
        health, refused = server.get("/health"), server.get("/v1/models")
        assert health.status_code == 200
        assert health.json()["state"] == "loading" and health.json()["occupancy"] is None
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) > 0
        assert server.post(TEXT, asked(1)).json()["error"]["code"] == "loading"
        server.ready()
        assert server.get("/ready").status_code == 200
        assert curl(server, "--http1.1") == "1.1 200"
        assert curl(server, "--http2") == "2 200"  # by ALPN
        with streaming(server, 300) as events:
            server.process.send_signal(signal.SIGTERM)
            while server.get("/health").json()["state"] == "ready":
                pass
            late = server.post(TEXT, asked(1))
            assert late.status_code == 503 and late.json()["error"]["code"] == "draining"
            *_, last, done = events
        assert '"finish_reason":"length"' in last and done == "data: [DONE]"
        assert server.wait_exit() == 0
        said = server.all_said()
        assert "ended" in said and "Traceback" not in said and "ERROR" not in said, said


def test_a_sigterm_as_soon_as_the_address_is_told(tmp_path: Path) -> None:
    with serving(gate=str(tmp_path / "never")) as server:
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_exit() == 0
        assert "ended while loading" in server.all_said()


def test_a_second_sigterm_ends_at_once(checkpoint: Path) -> None:
    with serving_model(checkpoint, *FLAGS, "--drain-timeout-s", "600") as server:
        server.ready()
        with streaming(server, 4000):
            server.process.send_signal(signal.SIGTERM)
            while server.get("/health").json()["state"] == "ready":
                pass
            began_s = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            assert server.wait_exit() == 128 + signal.SIGTERM
            assert time.monotonic() - began_s < 2


def test_torchrun(checkpoint: Path) -> None:
    served = ("-m", "runtime.serve", "--model", str(checkpoint), "--port", "0", *FLAGS)
    with serving_module("torch.distributed.run", "--nproc-per-node", "1", *served) as server:
        server.ready()
        assert server.post(TEXT, asked(4)).json()["usage"]["completion_tokens"] == 4
        server.process.send_signal(signal.SIGTERM)
        server.wait_exit()  # with torchrun's own code for signals
        assert "runtime.server: ended" in server.all_said()
        with pytest.raises(httpx.ConnectError):
            server.get("/health")


async def told_of_failure(url: str, http2: bool) -> None:
    """A stream that begins, and hears of the engine's end; or a request that came after it."""
    try:
        await hear_of_failure(url, http2)
    except httpx.RemoteProtocolError as error:
        assert http2 and f"error_code:{ErrorCodes.REFUSED_STREAM.value}," in str(error)


async def hear_of_failure(url: str, http2: bool) -> None:
    async with (
        httpx.AsyncClient(http1=not http2, http2=http2, timeout=SOON_S) as client,
        client.stream("POST", f"{url}{TEXT}", json=asked(4000, stream=True)) as response,
    ):
        if response.status_code == 503:
            return  # it came after the end
        assert response.status_code == 200
        *_, last = [line async for line in response.aiter_lines() if line]
        assert json.loads(last.removeprefix("data: "))["error"]["type"] == "server_error"


def test_an_engine_that_fails_ends_the_server_and_tells_everyone(checkpoint: Path) -> None:
    flags = ("--model", str(checkpoint), "--port", "0", "--max-running", "4", *FLAGS)
    with serving_module("tests.e2e.failing_server", "60", *flags) as server:
        server.ready()

        async def main() -> None:
            await asyncio.gather(*(told_of_failure(server.url, n % 2 == 0) for n in range(10)))

        asyncio.run(asyncio.wait_for(main(), SOON_S))
        assert server.wait_exit() == 1
        said = server.all_said()
        assert "InjectedFault: after 60 steps" in said
        assert "in _turn" in said, "the stack"
