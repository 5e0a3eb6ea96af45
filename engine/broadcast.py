"""Rank 0's side of a group of ranks: every step descriptor goes to all of them.

The others execute the same blocks in the same order and decide nothing. So they stay together
without asking each other, whatever ends, joins or is retracted.
"""

from collections.abc import Callable

from engine.executor import Executor, LaunchedStep
from engine.request import Int32Array

# Gives a block to all other ranks; the block may be overwritten on return.
Send = Callable[[Int32Array], None]


class BroadcastExecutor:
    """An `Executor` of all ranks. Owned by the engine thread."""

    def __init__(self, own: Executor, send: Send) -> None:
        self.pages, self.page_size, self.vocab_size = own.pages, own.page_size, own.vocab_size
        self._own, self._send = own, send

    def launch_no_sync(self, descriptor: Int32Array) -> LaunchedStep:
        """First the others: they wake up while this rank launches."""
        self._send(descriptor)
        return self._own.launch_no_sync(descriptor)

    def close(self) -> None:
        self._own.close()
