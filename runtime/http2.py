"""HTTP/2 as Hypercorn (0.18) speaks it, less its faults that a client can reach.

Rules
- A stream that is wrong fails alone. Frames that h2 itself cannot read, pseudo headers that are
  missing or doubled and lengths that are wrong among them, end the connection: h2 has lost the
  place where the next frame's headers would be decoded, or says that it has.
- No stream waits for its client without a limit.

Knows neither sockets nor routes.
"""

import asyncio
import time
from collections.abc import Buffer, Mapping
from contextlib import suppress
from typing import Any, Final

import h2.events
from h2.errors import ErrorCodes
from h2.exceptions import ProtocolError
from h2.frame_buffer import FrameBuffer
from hypercorn.events import Closed, Event, RawData
from hypercorn.protocol.events import Body
from hypercorn.protocol.events import Event as StreamEvent
from hypercorn.protocol.h2 import (
    BUFFER_HIGH_WATER,
    BUFFER_LOW_WATER,
    H2Protocol,
    StreamBuffer,
)
from hyperframe.frame import ContinuationFrame, Frame
from priority.priority import DeadlockError, PriorityTree

from httpd.service import Rejected
from httpd.text import shown
from runtime.refusal import headers_and_body
from runtime.turns import BUDGET_S, Turns

_MAX_HEADER_BLOCK_BYTES: Final = 16 << 10  # encoded, as over HTTP/1.1; decoding it takes 15 ms
_FRAME_HEAD_BYTES: Final = 9  # RFC 9113, 4.1; the first three are the length of the rest

# Streams that have something to send, or had just now. Those alive are limited by h2; these also
# count streams that were opened and reset since the sending task ran: about 2,500 a read.
_MAX_SENDING: Final = 1 << 20
_FRAMES_AT_ONCE: Final = 64  # of data, in one write: 1 MiB where they are large


class Http2(H2Protocol):
    """One connection's HTTP/2. Owned by its HTTP loop."""

    def __init__(self, stall_timeout_s: float, turns: Turns, *made_with: Any) -> None:
        super().__init__(*made_with)
        self._frames = Frames(self.connection.incoming_buffer.max_frame_size)
        self.connection.incoming_buffer = self._frames
        self._turns = turns
        self.priority = PriorityTree(_MAX_SENDING)
        self._stall_timeout_s = stall_timeout_s
        self._is_gathering = False  # what is sent goes in one write with what follows
        self._gathered = 0  # frames

    async def handle(self, event: Event) -> None:
        """As Hypercorn's, but many frames are taken in several turns of the loop."""
        await super().handle(event)
        while self._frames.may_have_more and not self.closed:
            await self._turns.wait()
            await super().handle(RawData(b""))

    async def send_task(self) -> None:
        """Sends what streams have, all that is ready in one write: an event of each stream that a
        step has brought costs one system call, not one each."""
        while not self.closed:
            try:
                stream_id = next(self.priority)
            except DeadlockError:
                await self._flush()
                await self.has_data.wait()
                await self.has_data.clear()
                continue
            self._is_gathering = True  # nothing below waits, so nobody else's bytes are held
            await self._send_data(stream_id)
            self._is_gathering = False
            self._gathered += 1
            if self._gathered >= _FRAMES_AT_ONCE:
                await self._flush()

    async def _flush(self) -> None:
        if not self._is_gathering:
            self._gathered = 0
            await super()._flush()

    async def stream_send(self, event: StreamEvent) -> None:
        if isinstance(event, Body) and self._has_room(event):
            await super().stream_send(event)  # which does not wait: a timer would cost more
            return
        try:
            async with asyncio.timeout(self._stall_timeout_s):
                await super().stream_send(event)
        except TimeoutError:
            await self._close_stream(event.stream_id)

    def _has_room(self, event: Body) -> bool:
        buffer = self.stream_buffers.get(event.stream_id)
        return buffer is not None and len(buffer.buffer) + len(event.data) < BUFFER_HIGH_WATER

    async def _handle_events(self, events: list[h2.events.Event]) -> None:
        if any(isinstance(event, h2.events.ConnectionTerminated) for event in events):
            await self.send(Closed())  # h2 sends nothing any more, an answer to these least of all
            return
        for event in events:
            await self._turns.wait()
            with suppress(ProtocolError):  # its stream was reset right behind it, in the same read
                await self._handle_event(event)
        await self._flush()

    async def _handle_event(self, event: h2.events.Event) -> None:
        if isinstance(event, h2.events.PriorityUpdated):
            return  # RFC 9113 took priorities back
        if isinstance(event, h2.events.DataReceived) and event.stream_id not in self.streams:
            size = event.flow_controlled_length  # its response is complete
            self.connection.acknowledge_received_data(size, event.stream_id)
            return
        if isinstance(event, h2.events.RequestReceived):
            if self.context.terminated.is_set():
                # The server ends, and did nothing of it: the client may ask another.
                self._reset(event.stream_id, ErrorCodes.REFUSED_STREAM)
                return
            wrong = _wrong_pseudo_header(dict(event.headers))
            if wrong is not None:
                self._refuse(event.stream_id, wrong)
                return
        await super()._handle_events([event])

    def _refuse(self, stream_id: int, wrong: Rejected) -> None:
        """Answers a request that the app cannot be shown."""
        headers, content = headers_and_body(wrong)
        headers = [(b":status", b"%d" % wrong.status), *headers]
        headers += self.config.response_headers("h2")
        self.connection.send_headers(stream_id, headers)
        if self.connection.local_flow_control_window(stream_id) >= len(content):
            self.connection.send_data(stream_id, content, end_stream=True)
            self._reset(stream_id, ErrorCodes.NO_ERROR)
        else:
            self._reset(stream_id, ErrorCodes.PROTOCOL_ERROR)

    async def _create_stream(self, request: h2.events.RequestReceived) -> None:
        await super()._create_stream(request)
        # The app's task is made, but has not run: nothing is in Hypercorn's buffer.
        self.stream_buffers[request.stream_id] = SendBuffer(self.context.event_class)

    async def _close_stream(self, stream_id: int) -> None:
        """Ends the app's side; what could not be sent is dropped, and its waiting sender let go."""
        buffer = self.stream_buffers.get(stream_id)
        if buffer is not None and not buffer.complete:
            await buffer.close()
            self._reset(stream_id, ErrorCodes.INTERNAL_ERROR)
            if not self.closed:
                await self._flush()
        await super()._close_stream(stream_id)

    async def _send_data(self, stream_id: int) -> None:
        await super()._send_data(stream_id)
        if stream_id not in self.stream_buffers:  # its response is complete
            self._reset(stream_id, ErrorCodes.NO_ERROR)
            await self._flush()

    def _reset(self, stream_id: int, code: ErrorCodes) -> None:
        """Ends what is open of a stream; after a complete response, asks for no more request."""
        stream = self.connection.streams.get(stream_id)
        if stream is not None and stream.open:
            with suppress(ProtocolError):  # the connection has ended meanwhile
                self.connection.reset_stream(stream_id, code)


class Frames(FrameBuffer):
    """What has come of a client's frames. Owned by its HTTP loop.

    A frame that is too long is refused by its head: h2 would first take in all of it, 16 MiB. A
    header block in many frames is refused once it is too long: h2 would take 1 MiB of it, and a
    second to decode it. After a while no more frames are given, until data is added again.
    """

    def __init__(self, max_frame_size: int) -> None:
        super().__init__(server=True)
        self.max_frame_size = max_frame_size
        self.may_have_more = False
        self._until_s = 0.0

    def add_data(self, data: Buffer) -> None:
        self.may_have_more = False
        self._until_s = time.thread_time() + BUDGET_S
        super().add_data(data)

    def __next__(self) -> Frame:
        if time.thread_time() >= self._until_s:
            self.may_have_more = True
            raise StopIteration
        if len(self._data) >= _FRAME_HEAD_BYTES:
            self._validate_frame_length(int.from_bytes(self._data[:3]))
        return super().__next__()

    def _update_header_buffer(self, frame: Frame | None) -> Frame | None:
        if isinstance(frame, ContinuationFrame):
            size = len(frame.data) + sum(len(part.data) for part in self._headers_buffer)
            if size > _MAX_HEADER_BLOCK_BYTES:
                raise ProtocolError(f"a header block of at least {size} bytes")
        return super()._update_header_buffer(frame)


class SendBuffer(StreamBuffer):
    """What the app has sent on one stream and its client not yet taken. Owned by its HTTP loop."""

    async def pop(self, max_length: int) -> bytes:
        """Lets the app go on once little is left; Hypercorn's does where little was taken."""
        data = bytes(self.buffer[:max_length])
        del self.buffer[:max_length]
        if len(self.buffer) < BUFFER_LOW_WATER:
            await self._paused.set()
        if not self.buffer:
            await self._is_empty.set()
        return data


def _wrong_pseudo_header(headers: Mapping[bytes, bytes]) -> Rejected | None:
    """What h2 lets pass and Hypercorn stumbles over, with every other stream of the connection."""
    method, path = headers[b":method"], headers.get(b":path", b"")
    if not method.isascii():
        return _invalid("method", method)
    if not path.isascii():
        return _invalid("path", path)
    if method.upper() == b"CONNECT":  # tunnels and web sockets
        message = "This server does not take the method CONNECT."
        return Rejected(405, message, code="method_not_allowed")
    return None


def _invalid(name: str, value: bytes) -> Rejected:
    message = f"Invalid ':{name}': {shown(value.decode('latin-1'))} is not ASCII."
    return Rejected(400, message, code=f"invalid_{name}")
