"""Whether the next request may start: are there pages for its prompt, and for everyone's answers?

Knows neither the order of the queue nor steps.
"""

import enum

import numpy as np

from engine.forecast import FORESEEN_TOKENS, OutputForecast, peak_tokens
from engine.holdings import Holdings
from engine.prefix_cache import Match
from engine.request import Int32Array
from engine.waiting import Waiting


class Refusal(enum.Enum):
    """Why a request does not start now: which budget is spent, in words for people."""

    PREFILL = "prompt tokens of the step"
    ROWS = "rows"
    PAGES = "pages for its prompt"
    PAGES_LATER = "pages for its prompt and for what running requests are going to make"
    SIBLING = "none: most of its prompt is being computed for another"  # and soon in the cache


class Admission:
    """Lets requests in. Owned by the engine thread."""

    def __init__(self, holdings: Holdings) -> None:
        self.forecast = OutputForecast()
        self._holdings = holdings
        # By request id. They hold until something comes back or is cached: until then the same
        # request is not looked at again.
        self._refused: dict[int, Refusal] = {}
        self._changes = 0  # the holdings' when they were refused

    def try_admit(self, waiting: Waiting, *, waits: bool = True) -> int | Refusal:
        """Gives the request a row and its prompt's pages, if that leaves enough for the others.

        waits  for a sibling to compute what it needs; False: it starts whatever others compute
        """
        holdings, request = self._holdings, waiting.request
        if not holdings.rows.free:
            return Refusal.ROWS
        if self._changes != holdings.changes:
            self._changes = holdings.changes
            self._refused.clear()
        refusal = self._refused.get(request.id)
        if refusal is not None and (waits or refusal is not Refusal.SIBLING):
            return refusal
        match = holdings.cache.match(request.namespace, _reusable(waiting))
        refusal = self._try_lock(waiting, match, waits)
        if refusal is not None:
            self._refused[request.id] = refusal
            return refusal
        pages = holdings.take_pages(self._missing_pages(waiting, match))
        return holdings.install(waiting, match, pages)

    def would_fit(self, waiting: Waiting, pages: int) -> bool:
        """Whether there is room for a request that was refused once `pages` more come back."""
        match = self._holdings.cache.match(waiting.request.namespace, _reusable(waiting))
        needed = self._missing_pages(waiting, match) + self._reserved_pages(waiting)
        return needed <= self._holdings.takeable_pages + pages

    def _try_lock(self, waiting: Waiting, match: Match, waits: bool) -> Refusal | None:
        """Locks the matched prefix, unless the request cannot start."""
        holdings = self._holdings
        missing = self._missing_pages(waiting, match)
        if waits and self._coming_pages(waiting, match) * 2 >= missing:
            # At least half of what it lacks: so it waits for a few at most, one after another.
            return Refusal.SIBLING
        needed = missing + self._reserved_pages(waiting)
        # Twice: locking the matched path turns pages that could be evicted into protected ones.
        if needed > holdings.takeable_pages:
            return self._too_many(missing)
        holdings.cache.lock(match.node)
        if needed > holdings.takeable_pages:
            refusal = self._too_many(missing)
            holdings.cache.unlock(match.node)
            return refusal
        return None

    def _too_many(self, prompt_pages: int) -> Refusal:
        fits = prompt_pages <= self._holdings.takeable_pages
        return Refusal.PAGES_LATER if fits else Refusal.PAGES

    def _coming_pages(self, waiting: Waiting, match: Match) -> int:
        """Pages of the prompt that are not cached, but being computed for others."""
        producers, namespace = self._holdings.producers, waiting.request.namespace
        return producers.coming_pages(namespace, _reusable(waiting)) - len(match.pages)

    def _missing_pages(self, waiting: Waiting, match: Match) -> int:
        """Pages of the prompt that are not cached."""
        page_size = self._holdings.cache.page_size
        return -(-len(waiting.token_ids) // page_size) - len(match.pages)

    def _reserved_pages(self, waiting: Waiting) -> int:
        """Pages kept for what running requests, and this one, are expected to make.

        Nothing is kept where nobody runs: then the request may have it all.
        """
        rows, page_size = self._holdings.rows, self._holdings.cache.page_size
        live = rows.live()
        if not len(live):
            return 0
        left = rows.limit[live] - np.maximum(rows.cached[live], rows.prefill_end[live])
        left = np.append(left, waiting.limit - len(waiting.token_ids))
        held = np.append(page_size * (rows.pages[live] - rows.shared[live]), 0)
        tokens = peak_tokens(self.forecast.share * np.minimum(left, FORESEEN_TOKENS), held)
        # Whatever the forecast, each row may be about to need its next page.
        return len(live) + int(tokens) // page_size


def _reusable(waiting: Waiting) -> Int32Array:
    """The tokens whose KV may come from the cache."""
    wants_logprobs = waiting.request.params.prompt_logprobs is not None and not waiting.started
    # Logprobs of a prompt come from computing all of it.
    return waiting.token_ids[: 0 if wants_logprobs else -1]
