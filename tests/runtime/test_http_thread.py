"""Hypercorn as it is set up here, over real sockets."""

import asyncio
import json
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import h2.connection
import h2.errors
import h2.events
import httpx
import pytest

from tests.server_process import SOON_S, ServerProcess, body, serving

TLS = Path(__file__).parent / "tls"


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """Nine requests at most: eight that run and one that waits."""
    with serving(max_queued=1, max_streams=500, drain_timeout_s=0.0) as server:
        server.ready()
        yield server
        assert server.process.poll() is None, server.all_said()


@pytest.mark.parametrize("version", ["HTTP/1.1", "HTTP/2"])
def test_both_protocols_on_one_cleartext_port(server: ServerProcess, version: str) -> None:
    with httpx.Client(http1=version == "HTTP/1.1", http2=version == "HTTP/2") as client:
        for _ in range(3):
            answer = client.post(f"{server.url}/v1/completions", json=body("hello"))
            assert answer.http_version == version
            assert answer.json()["choices"][0]["text"] == "hellohel"
            assert "server" not in answer.headers


def test_more_streams_on_a_connection_than_hypercorns_default(server: ServerProcess) -> None:
    async def main() -> list[int]:
        limits = httpx.Limits(max_connections=1)
        async with httpx.AsyncClient(http1=False, http2=True, limits=limits) as client:
            url = f"{server.url}/v1/completions"
            asking = [client.post(url, json=body("slow", max_tokens=20)) for _ in range(150)]
            return [answer.status_code for answer in await asyncio.gather(*asking)]

    statuses = asyncio.run(asyncio.wait_for(main(), SOON_S))
    assert set(statuses) == {200, 503} and statuses.count(200) >= 9


@pytest.mark.parametrize("version", ["HTTP/1.1", "HTTP/2"])
def test_streams_that_clients_leave_make_room_within_a_second(
    server: ServerProcess, version: str
) -> None:
    request = body("endless", stream=True, max_tokens=4000)
    with httpx.Client(http1=version == "HTTP/1.1", http2=version == "HTTP/2") as client:
        with ExitStack() as streams:
            for _ in range(9):
                stream = client.stream("POST", f"{server.url}/v1/completions", json=request)
                assert streams.enter_context(stream).status_code == 200
            full = server.ask("hello")
            assert full.status_code == 503 and full.json()["error"]["code"] == "queue_full"
            assert full.headers["retry-after"] == "1"
    assert_room_soon(server)


def assert_room_soon(server: ServerProcess) -> None:
    left_s = time.monotonic()
    while server.ask("hello").status_code != 200:
        assert time.monotonic() - left_s < 1.0


def test_a_reset_stream_makes_room_while_its_connection_goes_on(server: ServerProcess) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    request = json.dumps(body("endless", stream=True, max_tokens=4000)).encode()
    protocol = h2.connection.H2Connection()
    protocol.initiate_connection()
    with socket.create_connection((host, int(port)), timeout=SOON_S) as peer:
        streams = [protocol.get_next_available_stream_id() + 2 * index for index in range(9)]
        for stream in streams:
            protocol.send_headers(stream, [
                (":method", "POST"), (":path", "/v1/completions"), (":scheme", "http"),
                (":authority", host), ("content-type", "application/json"),
            ])  # fmt: skip
            protocol.send_data(stream, request, end_stream=True)
        peer.sendall(protocol.data_to_send())
        answered: set[int | None] = set()
        while answered != set(streams):
            events = protocol.receive_data(peer.recv(1 << 16))
            answered |= {e.stream_id for e in events if isinstance(e, h2.events.DataReceived)}
        assert server.ask("hello").status_code == 503
        for stream in streams:
            protocol.reset_stream(stream, h2.errors.ErrorCodes.CANCEL)
        peer.sendall(protocol.data_to_send())
        assert_room_soon(server)


def test_a_client_that_leaves_before_its_answer_makes_room(server: ServerProcess) -> None:
    """Not streaming: nothing was sent yet that could fail."""
    for _ in range(9):
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                f"{server.url}/v1/completions", json=body("endless", max_tokens=4000), timeout=0.1
            )
    assert_room_soon(server)


@pytest.mark.parametrize("version", ["HTTP/1.1", "HTTP/2"])
def test_connections_that_clients_close_are_closed_here_too(
    server: ServerProcess, version: str
) -> None:
    """Whether idle or in the middle of a response: each would keep a file descriptor."""
    folder = Path(f"/proc/{server.process.pid}/fd")
    before = len(list(folder.iterdir()))
    for _ in range(8):
        with httpx.Client(http1=version == "HTTP/1.1", http2=version == "HTTP/2") as client:
            client.get(f"{server.url}/health")
            request = body("endless", stream=True, max_tokens=4000)
            with client.stream("POST", f"{server.url}/v1/completions", json=request):
                pass
    closed_s = time.monotonic()
    while len(list(folder.iterdir())) > before:
        assert time.monotonic() - closed_s < 1.0


@pytest.mark.parametrize("http2", [False, True], ids=["HTTP/1.1", "HTTP/2"])
def test_tls_with_alpn(http2: bool) -> None:
    with serving(tls_cert=str(TLS / "cert.pem"), tls_key=str(TLS / "key.pem")) as server:
        server.ready()
        assert server.url.startswith("https://")
        trusted = ssl.create_default_context(cafile=TLS / "cert.pem")
        with httpx.Client(verify=trusted, http2=http2) as client:
            answer = client.post(f"{server.url}/v1/completions", json=body("hello"))
        assert answer.http_version == ("HTTP/2" if http2 else "HTTP/1.1")
        assert answer.json()["choices"][0]["text"] == "hellohel"
