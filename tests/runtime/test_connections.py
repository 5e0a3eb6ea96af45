"""Connections whose clients go while the server has something left to say to them."""

import asyncio
import json
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import h2.connection
import h2.events
import h2.settings
import pytest
from hypercorn.config import Config
from hypercorn.events import RawData
from starlette.types import Receive, Scope, Send

from runtime.connections import Connection, serve_connections
from tests.server_process import SOON_S, ServerProcess, body, serving

STREAMS = 4


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with serving() as server:
        yield server.ready()


def open_files(server: ServerProcess) -> int:
    return len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))


def ask_with_closed_windows(server: ServerProcess, request: dict[str, object]) -> socket.socket:
    """Requests of a client that takes headers but no data; returns once the headers are there."""
    host, port = server.url.removeprefix("http://").split(":")
    protocol = h2.connection.H2Connection()
    protocol.initiate_connection()
    protocol.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 0})
    peer = socket.create_connection((host, int(port)), timeout=SOON_S)
    for stream_id in range(1, 2 * STREAMS, 2):
        protocol.send_headers(stream_id, [
            (":method", "POST"), (":path", "/v1/completions"), (":scheme", "http"),
            (":authority", host),
        ])  # fmt: skip
        protocol.send_data(stream_id, json.dumps(request).encode(), end_stream=True)
    peer.sendall(protocol.data_to_send())
    answered = 0
    while answered < STREAMS:
        events = protocol.receive_data(peer.recv(1 << 16))
        answered += sum(isinstance(event, h2.events.ResponseReceived) for event in events)
    return peer


@pytest.mark.parametrize("request_body", [
    pytest.param(body("hello", max_tokens=-1), id="refused"),
    pytest.param(body("hello"), id="whole"),
    pytest.param(body("hello", stream=True), id="stream"),
])  # fmt: skip
def test_what_could_not_be_sent_does_not_keep_the_connection(
    server: ServerProcess, request_body: dict[str, object]
) -> None:
    before = open_files(server)
    ask_with_closed_windows(server, request_body).close()
    closed_s = time.monotonic()
    while open_files(server) > before:
        assert time.monotonic() - closed_s < 1.0


@pytest.fixture(scope="module")
def impatient() -> Iterator[ServerProcess]:
    with serving(stall_timeout_s=0.5) as server:
        yield server.ready()
        assert server.process.poll() is None, server.all_said()
        server.process.terminate()
        server.wait_exit()
        assert "Traceback" not in server.all_said()


@contextmanager
def connections_cut(server: ServerProcess) -> Iterator[None]:
    """What is connected inside is cut by the server, though it is not closed by its client."""
    before = open_files(server)
    yield
    began_s = time.monotonic()
    while open_files(server) > before:
        assert time.monotonic() - began_s < SOON_S


GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\x04\0\0\0\0\0"
PING = b"\0\0\x08\x06\0\0\0\0\0" + b"p" * 8


@pytest.mark.parametrize("sent", [
    pytest.param(GET, id="a large answer"),
    pytest.param(GET * 10_000, id="many small answers"),
    pytest.param(PREFACE + PING * 100_000, id="HTTP/2 pings"),
])  # fmt: skip
def test_a_client_that_asks_and_never_reads_is_cut(sent: bytes) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": bytes(8 << 20 if sent is GET else 999)})

    async def main() -> int:
        listening = socket.socket()
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        with socket.socket() as peer:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            peer.setblocking(False)

            async def wait_cut() -> None:
                """Until the server has done with the connection."""
                loop = asyncio.get_running_loop()
                await loop.sock_connect(peer, listening.getsockname())
                with suppress(ConnectionError):
                    await loop.sock_sendall(peer, sent)
                for held in (True, False):
                    while (len(asyncio.all_tasks()) > 1) != held:
                        await asyncio.sleep(0.01)

            return await serve_connections(
                app, Config(), listening, wait_cut, stall_timeout_s=0.1, close_timeout_s=0.0,
                connections=[0], index=0,
            )  # fmt: skip

    assert asyncio.run(asyncio.wait_for(main(), SOON_S)) == 0


@pytest.mark.parametrize("request_body", [
    pytest.param(body("hello", max_tokens=-1), id="refused"),
    pytest.param(body("hello"), id="whole"),
    pytest.param(body("endless", stream=True, max_tokens=4000), id="stream"),
])  # fmt: skip
def test_streams_that_are_not_read_are_reset(
    impatient: ServerProcess, request_body: dict[str, object]
) -> None:
    """While their connection goes on."""
    with ask_with_closed_windows(impatient, request_body) as peer:
        reset = b"".join(
            b"\0\0\x04\x03\0" + stream_id.to_bytes(4) for stream_id in range(1, 2 * STREAMS, 2)
        )
        left = {reset[i : i + 9] for i in range(0, len(reset), 9)}
        come = b""
        while any(head not in come for head in left):
            received = peer.recv(1 << 16)
            assert received
            come += received
        impatient.wait_at_rest()


def test_a_body_that_nobody_reads_does_not_keep_its_connection() -> None:
    """Small chunks, so that what waits for the app is full when the app has ended."""
    with serving(cors_origins=["http://ui"]) as server, connections_cut(server.ready()):
        with server.connect() as peer:
            peer.sendall(
                b"OPTIONS /health HTTP/1.1\r\nhost: x\r\norigin: http://ui\r\n"
                b"access-control-request-method: POST\r\ntransfer-encoding: chunked\r\n\r\n"
                + b"1\r\nx\r\n"
                * 1000
            )
            with pytest.raises(ConnectionError):
                while True:
                    peer.sendall(b"1\r\nx\r\n" * 1000)


def test_a_client_that_does_not_read_is_cut_without_a_trace() -> None:
    with serving() as server:
        server.ready()
        peer = ask_with_closed_windows(server, body("hello", stream=True))
        server.process.send_signal(signal.SIGTERM)
        server.wait_exit()
        peer.close()
        assert "Traceback" not in server.all_said()


def test_nothing_is_written_to_a_connection_that_closes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """asyncio would log a warning for each."""

    class Lost:
        def is_closing(self) -> bool:
            return True

    async def main() -> None:
        connection = Connection.__new__(Connection)
        connection.writer = Lost()  # type: ignore[assignment]
        await connection.protocol_send(RawData(b"late"))

    asyncio.run(main())
    assert caplog.text == ""
