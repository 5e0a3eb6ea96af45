"""Requests that hold no pages yet, or hold none any more."""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from engine.request import Int32Array, Request


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request to be admitted; `token_ids` are its prompt and what it made before a retraction."""

    request: Request
    token_ids: Int32Array
    order: int  # arrival order; kept over retractions
    started: bool = False
    cached_tokens: int = 0  # of its first admission

    @property
    def limit(self) -> int:
        # A request that only scores its prompt draws a token all the same, which nobody hears of.
        return len(self.request.prompt_ids) + max(1, self.request.params.max_new_tokens)


class WaitingQueue:
    """First come, first served. Owned by the engine thread."""

    def __init__(self) -> None:
        self._queue: OrderedDict[int, Waiting] = OrderedDict()
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._queue)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._queue

    def __iter__(self) -> Iterator[Waiting]:
        return iter(self._queue.values())

    def add(self, request: Request) -> None:
        assert request.id not in self._queue
        self._arrivals += 1
        prompt = np.asarray(request.prompt_ids, np.int32)
        self._queue[request.id] = Waiting(request, prompt, self._arrivals)

    def put_back(self, waiting: Waiting) -> None:
        """A retracted request goes before everything that arrived after it.

        Retraction takes the youngest first, so the front is always right.
        """
        self._queue[waiting.request.id] = waiting
        self._queue.move_to_end(waiting.request.id, last=False)

    def first(self, count: int) -> list[Waiting]:
        """Up to `count`, in the order in which they are to start."""
        return list(islice(self._queue.values(), count))

    def remove(self, request_id: int) -> Waiting | None:
        return self._queue.pop(request_id, None)
