"""How much of a loop's time goes to what clients send, so that answers flow on in between.

asyncio serves whoever is ready, in order: a hundred connections that each bring a millisecond of
work would hold every stream for a tenth of a second.

Rules
- Work on input begins only while the loop's turn is young; the rest waits for the next turn.
- One piece of work cannot be interrupted. After a turn that took long, as long is left to others.
- Work is measured in the thread's own time: on a machine that is busy with other programs, turns
  would otherwise seem long, and input would get next to nothing.
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
        self._began_s: float | None = None  # time.thread_time() of this turn's first input
        self._rest_until_s = 0.0

    async def wait(self) -> None:
        """Returns at once, or in a later turn."""
        while True:
            rest_s = self._rest_until_s - time.monotonic()
            worked_s = time.thread_time()
            if rest_s > 0:
                await asyncio.sleep(rest_s)
            elif self._began_s is None:
                self._began_s = worked_s
                asyncio.get_running_loop().call_soon(self._end_turn)
                return
            elif worked_s - self._began_s < BUDGET_S:
                return
            else:
                await asyncio.sleep(0)

    def _end_turn(self) -> None:
        """Called when the next turn begins, before any work of its own."""
        assert self._began_s is not None
        took_s, self._began_s = time.thread_time() - self._began_s, None
        if took_s > _LONG_S:
            self._rest_until_s = time.monotonic() + min(took_s, _MOST_REST_S)
