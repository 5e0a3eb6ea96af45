"""What the engine asks of a device.

An executor keeps the per-row device state (page table, length, last token, sampling parameters),
applies the changes a step descriptor carries, and runs the step. It decides nothing.
"""

from typing import Protocol

from engine.logprobs import StepLogprobs
from engine.request import Int32Array


class LaunchedStep(Protocol):
    """One step in flight. Owned by the engine thread."""

    def wait_tokens_sync(self) -> Int32Array:
        """Blocks until done: its token ids are on the host, and every page that it reads or writes
        is idle. [sampled] int32: first the prefill segments that sample, in the descriptor's order,
        then its decode rows in order."""
        ...

    def wait_logprobs_sync(self) -> StepLogprobs | None:
        """Blocks until done. None where no row of the step asked for any."""
        ...


class Executor(Protocol):
    """Runs step descriptors in the order they are launched. Owned by the engine thread."""

    pages: int  # pages of the KV pool, the dummy page 0 included
    page_size: int
    vocab_size: int  # width of the logits

    def launch_no_sync(self, descriptor: Int32Array) -> LaunchedStep:
        """Applies the descriptor's changes and starts its step; does not wait for the device.

        The executor copies what it keeps: the caller may overwrite `descriptor` on return.
        """
        ...

    def close(self) -> None: ...
