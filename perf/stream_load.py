"""Streamed answers over and over, from one process that spends as little as it can on each event.

    python -m perf.stream_load HOST PORT BODY_FILE --http2 --streams 64 --answers 256

Reads no event: it counts bytes, and sees that an answer has status 200 and its last event. So one
process drives more than one HTTP loop of a server; perf.bench_frontend starts several. Prints JSON.
"""

import asyncio
import json
import struct
import time
from pathlib import Path
from typing import Final, cast

import click
from hpack import Decoder, Encoder

_DONE: Final = b"data: [DONE]\n\n"
_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_WINDOW: Final = (1 << 31) - 1
_WINDOW_AT_START: Final = 65_535  # RFC 9113, 6.9.2
_FRAME_BYTES: Final = 16_384  # the most that a server takes unless it says more
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_END_STREAM, _END_HEADERS, _ACK = 1, 4, 1


class Work:
    """What is still to be asked, and what has come. Owned by the loop."""

    def __init__(self, target: str, body: bytes, answers: int) -> None:
        self.target, self.body = target, body
        self.to_ask, self.awaited = answers, answers
        self.data_bytes = 0
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def take(self) -> bool:
        """True where one more is to be asked."""
        self.to_ask -= 1
        return self.to_ask >= 0

    def on_answer(self, status: bytes, tail: bytes) -> None:
        self.awaited -= 1
        if status != b"200" or not tail.endswith(_DONE):
            self.fail(f"status {status!r}, and at the end {tail!r}")
        elif self.awaited == 0 and not self.ended.done():
            self.ended.set_result(None)

    def fail(self, why: str) -> None:
        if not self.ended.done():
            self.ended.set_exception(click.ClickException(why))


class Http1(asyncio.Protocol):
    """One answer at a time. Owned by the loop."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._head = (
            f"POST {work.target} HTTP/1.1\r\nhost: plait\r\ncontent-type: application/json\r\n"
            f"content-length: {len(work.body)}\r\n\r\n"
        ).encode()
        self._status, self._tail = b"", b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._ask()

    def connection_lost(self, exc: Exception | None) -> None:
        self._work.fail(f"the connection is lost: {exc}")

    def _ask(self) -> None:
        if self._work.take():
            self._status, self._tail = b"", b""
            self._transport.write(self._head + self._work.body)

    def data_received(self, data: bytes) -> None:
        self._work.data_bytes += len(data)
        self._status = self._status or data[9:12]
        self._tail = (self._tail + data[-64:])[-64:]
        if self._tail.endswith(b"\r\n0\r\n\r\n"):  # the last chunk
            self._work.on_answer(self._status, self._tail[:-7])
            self._ask()


class Http2(asyncio.Protocol):
    """As many answers at a time as it has streams. Owned by the loop."""

    def __init__(self, work: Work, streams: int) -> None:
        self._work, self._streams = work, streams
        self._encoder, self._decoder = Encoder(), Decoder()
        self._next_id = 1
        self._status: dict[int, bytes] = {}
        self._tails: dict[int, bytes] = {}
        self._rest = b""
        self._unread = 0  # bytes that the connection's window has lost

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        settings = struct.pack("!HI", 4, _WINDOW)  # of each stream
        more = struct.pack("!I", _WINDOW - _WINDOW_AT_START)
        self._transport.write(
            _PREFACE + frame(_SETTINGS, 0, 0, settings) + frame(_WINDOW_UPDATE, 0, 0, more)
        )
        for _ in range(self._streams):
            self._ask()

    def connection_lost(self, exc: Exception | None) -> None:
        self._work.fail(f"the connection is lost: {exc}")

    def _ask(self) -> None:
        if not self._work.take():
            return
        stream_id, self._next_id = self._next_id, self._next_id + 2
        block = self._encoder.encode([
            (":method", "POST"), (":scheme", "http"), (":authority", "plait"),
            (":path", self._work.target), ("content-type", "application/json"),
        ])  # fmt: skip
        self._transport.write(
            frame(_HEADERS, _END_HEADERS, stream_id, block)
            + frame(_DATA, _END_STREAM, stream_id, self._work.body)
        )

    def data_received(self, data: bytes) -> None:
        data = self._rest + data
        at, size = 0, len(data)
        while at + 9 <= size:
            end = at + 9 + int.from_bytes(data[at : at + 3])
            if end > size:
                break
            stream_id = int.from_bytes(data[at + 5 : at + 9])
            self._on_frame(data[at + 3], data[at + 4], stream_id, data[at + 9 : end])
            at = end
        self._rest = data[at:]
        if self._unread > _WINDOW // 2:
            self._transport.write(frame(_WINDOW_UPDATE, 0, 0, struct.pack("!I", self._unread)))
            self._unread = 0

    def _on_frame(self, kind: int, flags: int, stream_id: int, content: bytes) -> None:
        if kind == _DATA:
            self._unread += len(content)
            self._work.data_bytes += len(content)
            if content:
                self._tails[stream_id] = content[-64:]
        elif kind == _HEADERS:
            headers = self._decoder.decode(content, raw=True)
            self._status[stream_id] = dict(headers)[b":status"]
        elif kind == _RST_STREAM or kind == _GOAWAY:
            self._work.fail(f"frame of type {kind} on stream {stream_id}: {content!r}")
        elif kind in (_SETTINGS, _PING) and not flags & _ACK:
            self._transport.write(frame(kind, _ACK, 0, content if kind == _PING else b""))
        if kind in (_DATA, _HEADERS) and flags & _END_STREAM:
            self._work.on_answer(self._status.pop(stream_id), self._tails.pop(stream_id, b""))
            self._ask()


def frame(kind: int, flags: int, stream_id: int, content: bytes) -> bytes:
    """RFC 9113, 4.1."""
    return (
        struct.pack("!I", len(content))[1:] + struct.pack("!BBI", kind, flags, stream_id) + content
    )


async def load(host: str, port: int, work: Work, http2: bool, streams: int, each: int) -> float:
    """Seconds from the first connection to the last answer."""
    loop = asyncio.get_running_loop()
    begun = time.monotonic()
    transports = []
    for _ in range(streams // each):
        transport, _ = await loop.create_connection(
            lambda: Http2(work, each) if http2 else Http1(work), host, port
        )
        transports.append(transport)
    await work.ended
    wall_s = time.monotonic() - begun
    for transport in transports:
        transport.close()
    return wall_s


@click.command()
@click.argument("host")
@click.argument("port", type=int)
@click.argument("body_file", type=click.Path(path_type=Path))
@click.option("--target", default="/v1/chat/completions", show_default=True)
@click.option("--http2", is_flag=True)
@click.option("--streams", default=64, show_default=True)
@click.option("--each", default=1, show_default=True, help="HTTP/2: streams on a connection.")
@click.option("--answers", default=256, show_default=True)
def main(
    host: str, port: int, body_file: Path, target: str, http2: bool, streams: int, each: int,
    answers: int,
) -> None:  # fmt: skip
    """Takes so many answers, and says how long it took."""
    body = body_file.read_bytes()
    if len(body) > _FRAME_BYTES:
        raise click.ClickException(f"the body has {len(body)} bytes; at most {_FRAME_BYTES} go")

    async def run() -> dict[str, float]:
        work = Work(target, body, answers)
        wall_s = await load(host, port, work, http2, streams, each)
        return {"answers": answers, "data_bytes": work.data_bytes, "wall_s": wall_s}

    print(json.dumps(asyncio.run(run())))


if __name__ == "__main__":
    main()
