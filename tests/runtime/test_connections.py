"""Connections whose clients go while the server has something left to say to them."""

import asyncio
import json
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import h2.connection
import h2.events
import h2.settings
import pytest
from hypercorn.events import RawData

from runtime.connections import Connection
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
