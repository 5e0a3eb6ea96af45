"""The way back of one request: what has come for it, until its handler takes it.

Knows no threads: the service puts in and the handler takes out, on one loop.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from itertools import chain
from typing import Final

from engine.request import Delta, Finish
from httpd.service import Rejected

# Deltas; a client that reads slowly holds one long text, not objects. Where more is merged already,
# an eighth of its tokens: each merge copies them all, and so all merges together take linear time.
_MERGE_ABOVE: Final = 64
_MERGED_SHARE: Final = 8


class Route:
    """One request's verdict and buffer: its handler's `Generation`. Owned by its HTTP loop.

    Deltas may come before the verdict: they take another way. The request's own limit of new tokens
    bounds what is buffered.
    """

    __slots__ = (
        "_deltas",
        "_merge_above",
        "_on_abort",
        "_verdict",
        "_waiter",
        "abort_wanted",
        "accepted",
        "finished",
        "id",
        "prompt_tokens",
        "refused",
    )

    def __init__(self, request_id: int, on_abort: Callable[["Route"], None]) -> None:
        """on_abort  the handler wants nothing more; called for a route that is not over"""
        self.id = request_id
        self.prompt_tokens = 0
        self.accepted = False
        self.refused = False
        self.finished = False  # its last delta has come
        self.abort_wanted = False  # the service has sent the abort, or will on acceptance
        self._on_abort: Callable[[Route], None] | None = on_abort  # None: nobody reads any more
        self._verdict: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiter: asyncio.Future[None] | None = None
        self._deltas: list[Delta] = []
        self._merge_above = _MERGE_ABOVE

    @property
    def is_over(self) -> bool:
        """True once nothing more can come."""
        return self.refused or (self.accepted and self.finished)

    # What the service puts in

    def accept(self, prompt_tokens: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.accepted = True
        if not self._verdict.done():
            self._verdict.set_result(None)

    def refuse(self, reason: Rejected) -> None:
        self.refused = True
        if not self._verdict.done():
            self._verdict.set_exception(reason)
            self._verdict.exception()  # seen, in case that the handler is just being cancelled

    def add(self, delta: Delta) -> None:
        self.finished = self.finished or delta.finish is not Finish.NONE
        if self._on_abort is None:
            return
        self._deltas.append(delta)
        if len(self._deltas) > self._merge_above:
            merged = _merged(self._deltas)
            self._deltas = [merged]
            self._merge_above = max(_MERGE_ABOVE, len(merged.token_ids) // _MERGED_SHARE)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # What the handler takes out

    async def wait_verdict(self) -> None:
        """Returns once the request is accepted. Raises `Rejected`."""
        await self._verdict

    async def __aiter__(self) -> AsyncIterator[Delta]:
        finish = Finish.NONE
        while finish is Finish.NONE:
            while not self._deltas:
                if self._on_abort is None:
                    return
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
            deltas, self._deltas = self._deltas, []
            self._merge_above = _MERGE_ABOVE
            merged = _merged(deltas)
            finish = merged.finish
            yield merged

    def end(self) -> None:
        """Ends the request where it still runs; its last delta then tells the handler."""
        if self._on_abort is not None and not self.is_over:
            self._on_abort(self)

    def abort(self) -> None:
        """Drops what is buffered and all that comes; ends the request where it still runs."""
        on_abort, self._on_abort = self._on_abort, None
        self._deltas = []
        self._wake()
        if on_abort is not None and not self.is_over:
            on_abort(self)


def _merged(deltas: list[Delta]) -> Delta:
    """One delta that says what they say together."""
    last = deltas[-1]
    if len(deltas) == 1:
        return last
    return replace(
        last,
        text="".join(delta.text for delta in deltas),
        reasoning="".join(delta.reasoning for delta in deltas),
        token_ids=tuple(chain.from_iterable(delta.token_ids for delta in deltas)),
        scores=tuple(chain.from_iterable(delta.scores for delta in deltas)),
        prompt=deltas[0].prompt,  # it comes with the first
    )
