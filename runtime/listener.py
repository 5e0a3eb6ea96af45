"""Connections of a listening socket that HTTP loops share.

Rules
- Whichever loop is first takes a connection, one a turn: a burst does not keep a loop from the
  connections that it has.
- A loop that has more connections than another first leaves a new one to the others for a moment.
  So a few connections, of many streams each, are spread as evenly as many.

Knows nothing of what is said on a connection.
"""

import asyncio
import errno
import logging
import socket
from collections.abc import Callable
from typing import Final

log = logging.getLogger(__name__)

_LEAVE_S: Final = 1e-3  # far more than a loop with nothing to do needs to take a connection
_PAUSE_S: Final = 1.0  # once there is no file descriptor or memory for one more
_NO_ROOM: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Listener:
    """Takes connections for one HTTP loop. Owned by that loop."""

    def __init__(
        self,
        listening: socket.socket,
        connections: list[int],
        index: int,
        on_connection: Callable[[socket.socket], None],
    ) -> None:
        """
        listening    a duplicate of the shared one; closed by `close`
        connections  how many each loop has; `index` is this one's entry, which its owner keeps
        """
        self._listening = listening
        self._connections = connections
        self._index = index
        self._on_connection = on_connection
        self._left_one = False  # to the others, and nobody has taken it yet
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None
        listening.setblocking(False)
        self._listen()

    def close(self) -> None:
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._listening)
        self._listening.close()

    def _listen(self) -> None:
        self._pause = None
        self._loop.add_reader(self._listening, self._on_ready)

    def _listen_later(self, delay_s: float) -> None:
        self._loop.remove_reader(self._listening)
        self._pause = self._loop.call_later(delay_s, self._listen)

    def _on_ready(self) -> None:
        if self._connections[self._index] > min(self._connections) and not self._left_one:
            self._left_one = True
            self._listen_later(_LEAVE_S)
            return
        self._left_one = False
        try:
            connection, _ = self._listening.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return  # another loop has it, or its client has gone
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            log.error("no more connections for %g s: %s", _PAUSE_S, error)
            self._listen_later(_PAUSE_S)
            return
        connection.setblocking(False)
        self._on_connection(connection)
