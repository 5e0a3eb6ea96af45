"""How much of a loop's time goes to what clients send, so that answers flow on in between.

asyncio serves whoever is ready, in order: a hundred connections that each bring a millisecond of
work would hold every stream for a tenth of a second.

Rules
- Work on input begins only while the loop's turn is young; the rest waits for the next turn.
- One piece of work cannot be interrupted. After a turn that took long, as long is left to others.
"""

import asyncio
import time
from typing import Final

# Of work that is begun: what a turn then takes is this and one piece more, and a token passes
# through about three turns from its ring to its socket.
BUDGET_S: Final = 2e-3
_LONG_S: Final = 2 * BUDGET_S
_MOST_REST_S: Final = 50e-3


class Turns:
    """Says when input may be worked on. Owned by one HTTP loop, whose connections all ask it."""

    def __init__(self) -> None:
        self._began_s: float | None = None  # when this turn's first work on input did
        self._rest_until_s = 0.0

    async def wait(self) -> None:
        """Returns at once, or in a later turn."""
        while True:
            now_s = time.monotonic()
            if now_s < self._rest_until_s:
                await asyncio.sleep(self._rest_until_s - now_s)
            elif self._began_s is None:
                self._began_s = now_s
                asyncio.get_running_loop().call_soon(self._end_turn)
                return
            elif now_s - self._began_s < BUDGET_S:
                return
            else:
                await asyncio.sleep(0)

    def _end_turn(self) -> None:
        """Called when the next turn begins, before any work of its own."""
        assert self._began_s is not None
        now_s = time.monotonic()
        took_s, self._began_s = now_s - self._began_s, None
        if took_s > _LONG_S:
            self._rest_until_s = now_s + min(took_s, _MOST_REST_S)
