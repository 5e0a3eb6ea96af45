"""An HTTP loop: Hypercorn and the app on an asyncio loop, in a thread of its own.

The main thread keeps the signals and the watchdog, so that neither waits for a request.

Rules
- The loop leaves its thread once the server drains (when no request is left, or those that are were
  aborted after the drain's time) or has failed (after each open stream got its error event).
- Nothing here waits for a client without a limit.
- Each of several loops has its own connections and their requests. Loops share a listening socket,
  how many connections each has, and what their requests take of the queue; nothing else.
"""

import asyncio
import logging
import socket
import threading
from typing import Any, Final

from hypercorn.config import Config
from starlette.types import ASGIApp

from httpd.service import State
from runtime.access_log import AccessLog
from runtime.config import ServerConfig
from runtime.connections import serve_connections
from runtime.control import ServerControl
from runtime.inbox import Inbox, LoopInbox
from runtime.lifecycle import Lifecycle
from runtime.service import ThreadedService
from runtime.worker import TICK_S, Pulse, report_failure

log = logging.getLogger(__name__)

ABORT_GRACE_S: Final = 2.0  # for aborted requests to hear of their end
CLOSE_GRACE_S: Final = 5.0  # for the last bytes to reach the clients


def hypercorn_config(config: ServerConfig) -> Config:
    """Hypercorn's settings; those that are not its defaults have their reason here."""
    made = Config()
    made.backlog = 4096  # 100 drops the connections of a burst
    made.keep_alive_timeout = 75.0  # longer than clients keep idle connections: theirs to close
    made.keep_alive_max_requests = 1_000_000  # 1000 would cut off busy HTTP/2 connections
    made.h2_max_concurrent_streams = config.max_streams
    made.h11_max_incomplete_size = 16 << 10  # bounds request headers, and so a client's memory
    made.include_server_header = False
    made.errorlog = logging.getLogger("hypercorn.error")
    made.logger_class = AccessLog
    made.accesslog = logging.getLogger("hypercorn.access") if config.access_log else None
    if config.tls_cert is not None:
        made.certfile, made.keyfile = str(config.tls_cert), str(config.tls_key)
        made.alpn_protocols = ["h2", "http/1.1"]
    return made


class HttpLoop:
    """Serves the app until the server drains or fails. Owned by the HTTP thread."""

    def __init__(
        self,
        app: ASGIApp,
        hypercorn: Config,
        listening: socket.socket,
        service: ThreadedService,
        control: ServerControl,
        inbox: Inbox,
        lifecycle: Lifecycle,
        *,
        connections: list[int],
        index: int,
        stall_timeout_s: float,
        drain_timeout_s: float,
    ) -> None:
        """
        listening    a duplicate of the one that all loops share; taken over
        connections  how many each loop has; `index` is this one's entry
        """
        self._app = app
        self._hypercorn = hypercorn
        self._listening = listening
        self._service = service
        self._control = control
        self._inbox = LoopInbox(inbox, self._on_items)
        self._lifecycle = lifecycle
        self._connections = connections
        self._index = index
        self._stall_timeout_s = stall_timeout_s
        self._drain_timeout_s = drain_timeout_s
        self._ending = asyncio.Event()  # set once the server drains or has failed

    def run(self, pulse: Pulse) -> None:
        """The thread's body."""
        asyncio.run(self._serve(pulse))

    async def _serve(self, pulse: Pulse) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(_log_stray)
        self._inbox.attach(loop)
        beating = asyncio.create_task(_beat(pulse))
        try:
            cut = await serve_connections(
                self._app,
                self._hypercorn,
                self._listening,
                self._wait_end,
                stall_timeout_s=self._stall_timeout_s,
                close_timeout_s=CLOSE_GRACE_S,
                connections=self._connections,
                index=self._index,
            )
            if cut:
                log.warning("%d connections did not close in time and are cut", cut)
        finally:
            beating.cancel()
            self._inbox.detach()

    async def _wait_end(self) -> None:
        """Returns once the listener and its connections are to be closed."""
        await self._ending.wait()
        if await self._service.wait_none_left(self._drain_timeout_s):
            return
        log.warning("%d requests did not end in time and are aborted", self._service.alive)
        self._service.abort_all()
        if not await self._service.wait_none_left(ABORT_GRACE_S):
            self._service.fail_all()

    def _on_items(self) -> None:
        try:
            self._service.take_all()
            self._control.take_all()
            state = self._lifecycle.state
            if state is State.FAILED:
                self._service.fail_all()
            if state in (State.DRAINING, State.FAILED):
                self._ending.set()
        except Exception as error:  # asyncio would log it and go on, deaf
            report_failure(threading.current_thread().name, error, self._lifecycle)
            self._service.fail_all()
            self._ending.set()


async def _beat(pulse: Pulse) -> None:
    while True:
        pulse.beat()
        await asyncio.sleep(TICK_S)


def _log_stray(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """What a connection's own task raised. It concerns that client alone."""
    error = context.get("exception")
    if isinstance(error, OSError):  # ssl.SSLError included: a client's broken handshake or pipe
        log.debug("connection: %s", error)
    else:
        log.error("in the HTTP loop: %s", context["message"], exc_info=error)
