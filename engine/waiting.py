"""Requests that hold no pages yet, or hold none any more.

Guarantees: while a request waits, no more than OVERTAKINGS younger ones start before it. Once so
many have, it is the next to start, whatever the policy says, and nobody starts before it does.

Ageing needs no clock. A level of priority is worth AGEING arrivals: a request's `rank` is the place
it would have, had it come so many requests earlier. A rank never changes, so two requests never
take turns at pushing each other out, and only finitely many requests ever go before one.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final, Protocol

import numpy as np

from engine.request import Int32Array, Request

AGEING: Final = 64  # arrivals: as many requests as are looked at for one step
MOST_PRIORITY: Final = 100  # and least, negative: beyond it is no further
OVERTAKINGS: Final = 256  # as many as run at the same time by default
CANDIDATES: Final = 64  # of the queue, looked at for one step
UNINTERRUPTED: Final = -(1 << 63)  # a turn: before every key


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request to be admitted; `token_ids` are its prompt and what it made before a retraction."""

    request: Request
    token_ids: Int32Array
    order: int  # arrival order; kept over retractions
    started: bool = False  # its first token was committed
    cached_tokens: int = 0  # of its first admission
    host_tokens: int = 0  # of these, from host memory
    priority: int = 0  # the request's, where the policy looks at it; higher goes first
    retracted: bool = False

    @property
    def limit(self) -> int:
        # A request that only scores its prompt draws a token all the same, which nobody hears of.
        return len(self.request.prompt_ids) + max(1, self.request.params.max_new_tokens)

    @property
    def rank(self) -> int:
        """Arrival order, put forward by its priority: whose turn it is where only one can go on."""
        return self.order - AGEING * self.priority


class Order(Protocol):
    """What a queue asks of `engine.policies.Policy`."""

    has_priorities: bool
    interrupts: bool

    def key(self, waiting: Waiting) -> int: ...

    def ranked(self, first: Sequence[Waiting]) -> Sequence[Waiting]: ...


class WaitingQueue:
    """Requests in a policy's order. Owned by the engine thread."""

    def __init__(self, policy: Order, overtakings: int = OVERTAKINGS) -> None:
        self._policy = policy
        self._most_overtakings = overtakings
        self._entries: dict[int, tuple[Waiting, int]] = {}  # by request id, with the policy's key
        self._by_key: list[tuple[int, int, int]] = []  # (key, order, request id), sorted
        self._by_age: list[tuple[int, int]] = []  # (order, request id), sorted
        # Orders of those that started before the oldest, though younger; sorted. Those of them that
        # are younger than somebody else overtook that one, too: nobody was overtaken more often
        # than the oldest. (One that comes back counts those that overtook the oldest before it.)
        self._overtakers: list[int] = []
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._entries

    def __iter__(self) -> Iterator[Waiting]:
        """In the order of the queue."""
        return (self._entries[request_id][0] for _, _, request_id in self._by_key)

    @property
    def first(self) -> Waiting | None:
        """Who has the lowest key; None where nobody waits."""
        return self._entries[self._by_key[0][2]][0] if self._by_key else None

    def key_of(self, waiting: Waiting) -> int:
        return self._entries[waiting.request.id][1]

    def turn_of(self, waiting: Waiting) -> int:
        """Once it has started, those whose keys are lower may still go before the rest of it."""
        return self.key_of(waiting) if self._policy.interrupts else UNINTERRUPTED

    @property
    def oldest(self) -> Waiting:
        """Who came first of all that wait; somebody must."""
        return self._entries[self._by_age[0][1]][0]

    def add(self, request: Request) -> None:
        assert request.id not in self._entries
        self._arrivals += 1
        prompt = np.asarray(request.prompt_ids, np.int32)
        priority = max(-MOST_PRIORITY, min(request.priority, MOST_PRIORITY))
        priority = priority if self._policy.has_priorities else 0
        self._put(Waiting(request, prompt, self._arrivals, priority=priority))

    def put_back(self, waiting: Waiting) -> None:
        """Takes a request that was retracted."""
        assert waiting.retracted
        self._put(waiting)

    def candidates(self) -> Iterator[Waiting]:
        """Who is to start, one after the other. The caller starts each, passes it over, or stops.

        Whoever `is_due` comes first and may not be passed over.
        """
        first = list(islice(self, CANDIDATES))
        for waiting in self._policy.ranked(first) if first else ():
            while self._by_age and self.is_due(oldest := self.oldest):
                yield oldest
                assert oldest.request.id not in self, "it was passed over once too often"
            if waiting.request.id in self._entries:
                yield waiting

    def is_due(self, waiting: Waiting) -> bool:
        """It was overtaken as often as it may be: it has to start before anybody else."""
        is_oldest = self._by_age[0][1] == waiting.request.id
        return is_oldest and len(self._overtakers) >= self._most_overtakings

    def would_be_due(self, order: int) -> bool:
        """Whether a request that came so early, and were put back now, had to start before all."""
        is_oldest = not self._by_age or order < self._by_age[0][0]
        return is_oldest and len(self._overtakers) >= self._most_overtakings

    def start(self, waiting: Waiting) -> None:
        """Takes out a request that starts now."""
        self.remove(waiting.request.id)
        if self._by_age and waiting.order > self._by_age[0][0]:
            insort(self._overtakers, waiting.order)

    def remove(self, request_id: int) -> Waiting | None:
        """Takes out a request that ends, or starts; None where it does not wait."""
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return None
        waiting, key = entry
        del self._by_key[bisect_left(self._by_key, (key, waiting.order, request_id))]
        del self._by_age[bisect_left(self._by_age, (waiting.order, request_id))]
        oldest = self._by_age[0][0] if self._by_age else self._arrivals
        del self._overtakers[: bisect_right(self._overtakers, oldest)]
        return waiting

    def _put(self, waiting: Waiting) -> None:
        key, order, request_id = self._policy.key(waiting), waiting.order, waiting.request.id
        self._entries[request_id] = waiting, key
        insort(self._by_key, (key, order, request_id))
        insort(self._by_age, (order, request_id))
