"""How a rank learns that another one has ended, hangs or was stopped.

Rules
- Every rank says every second that it lives, on its link to rank 0, and rank 0 on each of its own.
- What silence means, and how long it may be, depends on where the peer is: see `peers.py`.
- Each sign of life is for the kernel, too, where the peer could not end this process.
- A thread that hangs inside a living process is its own watchdog's to find.
"""

import time
from collections.abc import Callable
from typing import Final

from runtime.ranks.links import Link, LinkClosed, Message, RanksError

BEAT_S: Final = 1.0
BEAT: Final[Message] = {"beat": 1}
DRAIN: Final[Message] = {"drain": 1}  # a rank above 0 was told to end: rank 0 decides


class Watched:
    """One link, its beats and its silence. Owned by the thread that owns the link."""

    def __init__(self, link: Link, clock: Callable[[], float] = time.monotonic) -> None:
        self.link = link
        self._clock = clock
        self._heard_s = self._told_s = clock()

    def receive(self) -> list[Message]:
        """What came but for beats. Raises RanksError where the peer has ended."""
        try:
            messages = self.link.receive()
        except LinkClosed as error:
            raise RanksError(f"{self.link.peer} ended without a word ({error})") from error
        if messages:
            self._heard_s = self._clock()
        return [message for message in messages if message != BEAT]

    def beat(self) -> None:
        """Says that this process lives, when it is time to. Raises RanksError as `receive`."""
        self.link.peer.renew()
        now_s = self._clock()
        if now_s - self._told_s >= BEAT_S:
            self._told_s = now_s
            self.tell(BEAT)

    def tell(self, message: Message) -> None:
        """Raises RanksError as `receive`."""
        try:
            self.link.send(message)
        except LinkClosed as error:
            raise RanksError(f"{self.link.peer} takes no word ({error})") from error

    def check(self) -> None:
        """Raises RanksError where the peer is silent too long, and ends it."""
        silent_s, peer = self._clock() - self._heard_s, self.link.peer
        meaning = peer.meaning(silent_s)
        if meaning is not None:
            peer.kill()
            raise RanksError(f"{peer} {meaning}, for {silent_s:.0f} s now; {peer.fate}")
