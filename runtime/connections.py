"""Hypercorn's connections on a listening socket, for as long as the caller says.

Hypercorn's own `serve` would do, but for faults that end in an outage: a connection whose client
has gone keeps its file descriptor until the keep-alive time is over (75 s here); one with HTTP/2
streams that the client had no window for keeps it, and their tasks, for ever; and closing waits for
connections without a limit. So the connection is Hypercorn's with these mended, over the protocols
of protocols.py, and the loop that accepts is ours. The app has no lifespan, and gets no events of
one.
"""

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from hypercorn.asyncio.task_group import TaskGroup
from hypercorn.asyncio.tcp_server import MAX_RECV, TCPServer
from hypercorn.asyncio.worker_context import WorkerContext
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.typing import (
    AppWrapper,
    ASGIReceiveEvent,
    ASGISendCallable,
    ASGISendEvent,
    ConnectionState,
    Scope,
)
from hypercorn.utils import parse_socket_addr, wrap_app
from starlette.types import ASGIApp

from runtime.listener import Listener
from runtime.peer import look_at
from runtime.protocols import Protocols
from runtime.turns import Turns

_LINGER_S: Final = 5.0  # for a client that has been refused to stop sending
_TLS_SHUTDOWN_S: Final = 5.0  # for the peer's half of closing; asyncio's 30 s keep sockets


class Connection(TCPServer):
    """One client's connection. Owned by its HTTP loop."""

    protocol: Protocols
    _is_over = False  # the peer has gone, or we cut it

    def __init__(self, stall_timeout_s: float, turns: Turns, *made_with: Any) -> None:
        """stall_timeout_s  for the client to take what is sent, or to take note of the end
        made_with        the arguments of Hypercorn's
        """
        super().__init__(*made_with)
        self._stall_timeout_s = stall_timeout_s
        self._turns = turns

    async def run(self) -> None:
        """As Hypercorn's, over our protocols; returns when the connection is closed."""
        self._reading = asyncio.current_task()
        tls = self.writer.get_extra_info("ssl_object")
        socket = self.writer.get_extra_info("socket")
        try:
            names = socket.getpeername(), socket.getsockname()
            async with AppTasks(self.loop) as self._task_group:
                self.protocol = Protocols(
                    None if tls is None else tls.selected_alpn_protocol(),
                    self._stall_timeout_s,
                    self._turns,
                    lambda: look_at(self.reader, self.writer),
                    self.app,
                    self.config,
                    self.context,
                    self._task_group,
                    ConnectionState(self.state),
                    tls is not None,
                    *(parse_socket_addr(socket.family, name) for name in names),
                    self.protocol_send,
                )
                await self.protocol.initiate()
                await self.idle_task.restart(self._task_group, self._idle_timeout)
                await self._read_data()
        except OSError:
            pass  # the client has gone
        finally:
            await self._close()

    async def protocol_send(self, event: Event) -> None:
        """Like Hypercorn's, but a connection that is over never becomes idle.

        Nor is anything written to one that closes: asyncio would log a warning each time.
        """
        if self._is_over and isinstance(event, Updated):
            return
        if isinstance(event, RawData):
            if not self.writer.is_closing():
                with self._cut_if_stalled():
                    await super().protocol_send(event)
            return
        if isinstance(event, Closed) and asyncio.current_task() is self._reading:
            await self.protocol.handle(event)
            await self._drop_rest()
        await super().protocol_send(event)

    async def _drop_rest(self) -> None:
        """Reads on after a refusal: closing with bytes unread would be a reset, and undo it."""
        try:
            if self.writer.can_write_eof():
                self.writer.write_eof()
            async with asyncio.timeout(_LINGER_S):
                while await self.reader.read(MAX_RECV):
                    pass
        except OSError:
            pass  # the client has gone, or (a TimeoutError) does not stop

    async def _read_data(self) -> None:
        """Until the client has gone, or sends no more and has its answer."""
        try:
            while data := await self._read():
                await self.protocol.handle(RawData(data))
            await self.protocol.finish()
        except OSError:
            pass  # the client has gone
        finally:
            self._is_over = True
        await self.protocol.handle(Closed())
        # The idle timer is a task that the connection's end would wait for.
        await self.idle_task.stop()

    async def _read(self) -> bytes:
        """What has come, or nothing more, in a turn for it: many ends at once are work, too."""
        data = await self.reader.read(MAX_RECV)
        await self._turns.wait()
        return data

    async def _close(self) -> None:
        with self._cut_if_stalled():
            await super()._close()

    async def _initiate_server_close(self) -> None:
        await super()._initiate_server_close()
        self.loop.call_later(self._stall_timeout_s, self.writer.transport.abort)

    @contextmanager
    def _cut_if_stalled(self) -> Iterator[None]:
        """Cuts a client that does not take within the stall time what is sent inside."""
        timer = self.loop.call_later(self._stall_timeout_s, self.writer.transport.abort)
        try:
            yield
        finally:
            timer.cancel()


class AppTasks(TaskGroup):
    """The tasks of one connection. Owned by its HTTP loop."""

    async def spawn_app(self, *made_with: Any) -> Callable[[ASGIReceiveEvent], Awaitable[None]]:
        """As Hypercorn's, but a disconnect never waits for an app that reads no more.

        An app that has ended would keep its connection: both the reader, with more of the body, and
        the end itself would wait for room in its queue.
        """
        put = await super().spawn_app(*made_with)
        queue: asyncio.Queue[ASGIReceiveEvent] = put.__self__  # type: ignore[attr-defined]

        async def put_or_replace(event: ASGIReceiveEvent) -> None:
            if event["type"] == "http.disconnect":
                while not queue.empty():
                    queue.get_nowait()
            await put(event)

        return put_or_replace


class AppInTurns:
    """The app as connections call it: until it answers, what it does is work on input.

    Owned by its HTTP loop.
    """

    def __init__(self, app: AppWrapper, turns: Turns) -> None:
        self._app, self._turns = app, turns

    async def __call__(
        self, scope: Scope, receive: Any, send: ASGISendCallable, *others: Any
    ) -> None:
        has_answered = False

        async def send_answer(event: ASGISendEvent) -> None:
            nonlocal has_answered
            has_answered = True
            await send(event)

        work = self._app(scope, receive, send_answer, *others)
        await self._turns.count(work, lambda: not has_answered)


async def serve_connections(
    app: ASGIApp,
    config: Config,
    listening: socket.socket,
    wait_end: Callable[[], Awaitable[None]],
    *,
    stall_timeout_s: float,
    close_timeout_s: float,
    connections: list[int],
    index: int,
) -> int:
    """Serves `app` until `wait_end` returns, then closes; how many connections had to be cut.

    listening        closed at the end; others may hold duplicates of it: see listener.py
    stall_timeout_s  for a client to take what is sent; then it is cut
    close_timeout_s  for connections to close once their responses are complete
    connections      how many each HTTP loop has; `index` is this one's entry
    """
    context = WorkerContext(None)
    tasks: set[asyncio.Task[None]] = set()
    turns = Turns()
    counted = AppInTurns(wrap_app(app, config.wsgi_max_body_size, "asgi"), turns)  # type: ignore[arg-type]
    tls = config.create_ssl_context()
    made_with = counted, asyncio.get_running_loop(), config, context, ConnectionState({})

    def on_connection(connection: socket.socket) -> None:
        serving = _serve_one(connection, tls, stall_timeout_s, turns, made_with)
        task = asyncio.create_task(turns.count(serving))
        tasks.add(task)
        task.add_done_callback(on_end)
        connections[index] = len(tasks)

    def on_end(task: asyncio.Task[None]) -> None:
        tasks.discard(task)
        connections[index] = len(tasks)

    listener = Listener(listening, connections, index, on_connection)
    try:
        await wait_end()
    finally:
        listener.close()
        await context.terminated.set()  # closes what is idle, and the others when they become so
        if tasks:
            await asyncio.wait(tasks, timeout=close_timeout_s)
        cut = len(tasks)
        for task in tasks:
            task.cancel()
    return cut


async def _serve_one(
    connection: socket.socket,
    tls: ssl.SSLContext | None,
    stall_timeout_s: float,
    turns: Turns,
    made_with: tuple[Any, ...],
) -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(loop=loop)
    protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
    try:
        transport, _ = await loop.connect_accepted_socket(
            lambda: protocol,
            connection,
            ssl=tls,
            ssl_shutdown_timeout=_TLS_SHUTDOWN_S if tls is not None else None,
        )
    except OSError:
        return  # the client has gone, or does not speak TLS
    writer = asyncio.StreamWriter(transport, protocol, reader, loop)
    await Connection(stall_timeout_s, turns, *made_with, reader, writer)
