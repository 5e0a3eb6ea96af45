"""A group of ranks in one process: a thread each, and collectives by shared memory.

Sums run in the order of ranks, so that a test computes the same bits every time.
"""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue

import torch

from engine.build import build_engine, build_executor
from engine.config import EngineConfig
from engine.core import Engine
from engine.request import Int32Array
from gpu_ops.collectives import FusedSum

LIMIT_S = 120.0


class ThreadRanks:
    """What the ranks' threads share. Safe from any thread: each writes its own places alone.

    A rank gives its tensor for exchange n, then waits for everybody to have come so far. Places of
    exchange n are written anew for n + 2, when all have passed n + 1 and so have read them.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.given: list[list[torch.Tensor]] = [[torch.empty(0)] * size for _ in range(2)]
        self.arrived = [0] * size
        self.is_broken = False

    def wait_for_all(self, number: int) -> None:
        deadline = time.monotonic() + LIMIT_S
        while min(self.arrived) < number:
            if self.is_broken or time.monotonic() > deadline:
                raise RuntimeError("another rank failed")
            os.sched_yield()  # a sleeping thread would be woken too late, thousands of times


class ThreadGroup:
    """A `RankGroup` of one thread. Owned by that thread."""

    def __init__(self, ranks: ThreadRanks, rank: int) -> None:
        self.rank, self.size, self._ranks = rank, ranks.size, ranks
        self.local_size = ranks.size
        self.fused: FusedSum | None = None
        self.gathered_bytes = 0
        self._exchanges = 0

    def fuse_norms(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        pass

    def _exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        assert x.is_contiguous()
        self._exchanges += 1
        places = self._ranks.given[self._exchanges % 2]
        places[self.rank] = x.clone()
        self._ranks.arrived[self.rank] = self._exchanges
        self._ranks.wait_for_all(self._exchanges)
        return list(places)

    def all_reduce_(self, x: torch.Tensor) -> torch.Tensor:
        parts = self._exchange(x)
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return x.copy_(total)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        parts = self._exchange(x)
        self.gathered_bytes += x.nbytes * self.size
        return torch.stack(parts)


class Queues:
    """A `StepSink` of queues. Owned by the engine's thread."""

    def __init__(self, followers: int) -> None:
        self.queues: list[SimpleQueue[Int32Array | None]] = [
            SimpleQueue() for _ in range(followers)
        ]

    def send(self, block: Int32Array) -> None:
        for queue in self.queues:
            queue.put(block.copy())

    def close(self) -> None:
        for queue in self.queues:
            queue.put(None)


@contextmanager
def engine_of_ranks(config: EngineConfig, size: int) -> Iterator[tuple[Engine, ThreadGroup]]:
    """An engine whose model `size` threads share, and rank 0's group, which is the caller's."""
    ranks, others = ThreadRanks(size), Queues(size - 1)
    failures: list[BaseException] = []

    def follow(rank: int) -> None:
        try:
            executor = build_executor(config, ThreadGroup(ranks, rank))
            while (block := others.queues[rank - 1].get()) is not None:
                executor.launch_no_sync(block)
                block[:] = -1  # the executor must have copied what it keeps
        except BaseException as error:
            failures.append(error)
            ranks.is_broken = True

    threads = [threading.Thread(target=follow, args=(rank,)) for rank in range(1, size)]
    for thread in threads:
        thread.start()
    try:
        group = ThreadGroup(ranks, 0)
        engine = build_engine(config, group=group, others=others)
        yield engine, group
        engine.close()
    finally:
        others.close()
        for thread in threads:
            thread.join(LIMIT_S)
            assert not thread.is_alive()
    if failures:
        raise failures[0]
