"""In which order waiting requests are to start.

Knows neither steps nor memory: whether a request fits is admission's to say, and engine/waiting.py
sees to it that nobody is overtaken for ever.

Every policy has a `key`: a request's place in the queue, which never changes while it waits. That
keeps a queue of any length sorted for nothing. A policy that looks at the prefix cache or at what
runs puts the first few of that queue in another order (`ranked`), and leaves the rest as it is, so
that a step's time does not depend on how many wait.
"""

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from engine.holdings import Holdings
from engine.prefix_cache import Match
from engine.waiting import Waiting

# Prompts looked up in the cache for one step. Each takes 10 to 25 µs (512 to 32,768 tokens, half of
# them shared, among 500,000 cached ones), and a step's host time is to stay below 200.
MATCHES: Final = 4

_LEAVES: Final = (0, 0)  # in a path of (negative weight, page): after every page
_FRONT: Final = -(1 << 62)  # before every other key: arrivals are far fewer


class Policy:
    """First come, first served; by priority first, where that is asked for.

    Owned by the engine thread.
    """

    # Whether the order holds for prompts that are being computed, too: only where every key has but
    # finitely many that come later and are lower, or a prompt might never get to its end.
    interrupts = True

    def __init__(self, *, has_priorities: bool = False) -> None:
        """has_priorities  False: what requests say of their priority is not looked at"""
        self.has_priorities = has_priorities

    def key(self, waiting: Waiting) -> int:
        """Its place in the queue, the lowest first; of equal ones the oldest goes first."""
        return waiting.rank

    def ranked(self, first: Sequence[Waiting]) -> Sequence[Waiting]:
        """The first of the queue, in the order in which they are to start."""
        return first


class ShortestPrompt(Policy):
    """First the short prompts, which a long one keeps waiting for much longer than they take.

    Owned by the engine thread. Here and in all that follow, whoever was retracted goes before
    everyone else: a client is reading its output.

    A prompt's tokens are those not cached when it came. It is overtaken by fewer than it has: its
    key is its own tokens and, once more, those of all up to it; whoever comes later has the latter
    in its key as well, and itself twice.
    """

    def __init__(self, holdings: Holdings) -> None:
        super().__init__()
        self._cache = holdings.cache
        self._arrived_tokens = 0

    def key(self, waiting: Waiting) -> int:
        if waiting.retracted:
            return _FRONT
        match = self._cache.match(waiting.request.namespace, waiting.token_ids[:-1])
        tokens = len(waiting.token_ids) - match.tokens - match.host_tokens
        self._arrived_tokens += tokens
        return self._arrived_tokens + tokens


class LongestOutput(Policy):
    """First who may make the most tokens: the long ones do not remain as a tail of few rows.

    Owned by the engine thread.
    """

    interrupts = False

    def key(self, waiting: Waiting) -> int:
        return _FRONT if waiting.retracted else len(waiting.token_ids) - waiting.limit


class Shuffled(Policy):
    """In an order drawn by chance, the same for the same seed. Owned by the engine thread."""

    interrupts = False

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = random.Random(seed)

    def key(self, waiting: Waiting) -> int:
        return _FRONT if waiting.retracted else self._random.getrandbits(32)


class Ranked(Policy):
    """A queue whose first few are ordered by what holds now. Owned by the engine thread."""

    interrupts = False

    def __init__(self, holdings: Holdings) -> None:
        super().__init__()
        self._holdings = holdings

    def key(self, waiting: Waiting) -> int:
        return _FRONT if waiting.retracted else waiting.rank

    def ranked(self, first: Sequence[Waiting]) -> Sequence[Waiting]:
        places = self._places(first)
        order = sorted(range(len(first)), key=lambda i: (not first[i].retracted, places[i]))
        return [first[index] for index in order]

    def _places(self, first: Sequence[Waiting]) -> Sequence[Any]:
        """Something to sort by for each, the lowest first."""
        raise NotImplementedError


class BusiestKey(Ranked):
    """First whose routing key most running requests have. Owned by the engine thread."""

    def _places(self, first: Sequence[Waiting]) -> Sequence[int]:
        rows = self._holdings.rows
        requests = [rows.requests[row] for row in rows.live().tolist()]
        running = Counter(request.routing_key for request in requests if request is not None)
        running.pop("", None)  # no key
        return [-running[each.request.routing_key] for each in first]


class LongestPrefix(Ranked):
    """First who finds most of its prompt in the cache. Owned by the engine thread."""

    def __init__(self, holdings: Holdings) -> None:
        super().__init__(holdings)
        # By request id, with what the holdings' changes were then.
        self._matches: dict[int, tuple[int, Match]] = {}
        self._none = holdings.cache.match("", np.empty(0, np.int32))

    def _places(self, first: Sequence[Waiting]) -> Sequence[Any]:
        return [-match.tokens - match.host_tokens for match in self._match_all(first)]

    def _match_all(self, first: Sequence[Waiting]) -> list[Match]:
        """What is cached of each, or was lately. For ordering only: pages may have been evicted.

        Those are looked up again that were not for the longest time. It counts as a use: what
        somebody waits for is evicted later than what nobody does.
        """
        now, unknown = self._holdings.changes, (-1, self._none)
        known = {each.request.id: self._matches.get(each.request.id, unknown) for each in first}
        stale = [each for each in first if known[each.request.id][0] != now]
        for each in sorted(stale, key=lambda each: known[each.request.id][0])[:MATCHES]:
            match = self._holdings.cache.match(each.request.namespace, each.token_ids[:-1])
            known[each.request.id] = now, match
        self._matches = known
        return [match for _, match in known.values()]


class HeaviestSubtree(LongestPrefix):
    """Depth first through the cached prefixes, those first that most wait for.

    Owned by the engine thread. The order of SGLang's dfs-weight, from the matches alone. A page has
    one place in the tree, so a request's pages are its path, and a page's weight is the number of
    requests that go through it. Paths sorted by the weights along them visit the tree as wanted.
    Where the weight stays the same from one page to the next nobody leaves the path, and only the
    first of these pages is kept. Whoever leaves the tree at a fork goes after those further down.
    """

    def _places(self, first: Sequence[Waiting]) -> Sequence[Any]:
        paths = [match.pages for match in self._match_all(first)]
        weights = np.bincount(np.concatenate(paths))
        places = []
        for path in paths:
            negative = -weights[path]
            forks = np.nonzero(np.diff(negative, prepend=1))[0]
            place = list(zip(negative[forks].tolist(), path[forks].tolist(), strict=True))
            places.append([*place, _LEAVES])
        return places


def build_policy(name: str, holdings: Holdings, seed: int = 0) -> Policy:
    """The policy of this name, one of engine.config.SCHEDULE_POLICIES.

    seed  of the random order
    """
    match name:
        case "lpm":
            return LongestPrefix(holdings)
        case "dfs-weight":
            return HeaviestSubtree(holdings)
        case "short-first":
            return ShortestPrompt(holdings)
        case "lof":
            return LongestOutput()
        case "random":
            return Shuffled(seed)
        case "routing-key":
            return BusiestKey(holdings)
        case "fcfs" | "priority":
            return Policy(has_priorities=name == "priority")
        case _:
            raise AssertionError(f"there is no policy {name!r}")
