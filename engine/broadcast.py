"""Rank 0's side of a group of ranks: every step descriptor goes to all of them.

The others execute the same blocks in the same order and decide nothing. So they stay together
without asking each other, whatever ends, joins or is retracted.
"""

from typing import Protocol

from engine.executor import Executor, LaunchedStep
from engine.request import Int32Array


class StepSink(Protocol):
    """Where the other ranks' descriptors go. Owned by the engine thread."""

    def send(self, block: Int32Array) -> None:
        """Gives `block` to all other ranks; the caller may overwrite it on return."""
        ...

    def close(self) -> None:
        """Tells them that no more will come."""
        ...


class BroadcastExecutor:
    """An `Executor` of all ranks. Owned by the engine thread."""

    def __init__(self, own: Executor, others: StepSink) -> None:
        self.pages, self.page_size, self.vocab_size = own.pages, own.page_size, own.vocab_size
        self._own, self._others = own, others

    def launch_no_sync(self, descriptor: Int32Array) -> LaunchedStep:
        """First the others: they wake up while this rank launches."""
        self._others.send(descriptor)
        return self._own.launch_no_sync(descriptor)

    def close(self) -> None:
        self._others.close()
        self._own.close()
