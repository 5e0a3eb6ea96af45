"""Whether the next request may start: are there pages for its prompt, and for everyone's answers?

Knows neither the order of the queue nor steps.
"""

import numpy as np

from engine.forecast import FORESEEN_TOKENS, OutputForecast
from engine.holdings import Holdings
from engine.prefix_cache import Match
from engine.waiting import Waiting


class Admission:
    """Lets requests in. Owned by the engine thread."""

    def __init__(self, holdings: Holdings, eos_ids: tuple[int, ...]) -> None:
        self.forecast = OutputForecast()
        self._holdings = holdings
        self._eos_ids = eos_ids
        self._refused: tuple[int, int] | None = None  # request id, and holdings.changes then

    def try_admit(self, waiting: Waiting) -> int | None:
        """Gives the request a row and its prompt's pages, if that leaves enough for the others.

        None where it does not. Such a request is not looked at again before pages have come back.
        """
        holdings = self._holdings
        attempt = (waiting.request.id, holdings.changes)
        if not holdings.rows.free or attempt == self._refused:
            return None
        match = self._try_lock(waiting)
        if match is None:
            self._refused = attempt
            return None
        pages = holdings.take_pages(self._missing_pages(waiting, match))
        params = waiting.request.params
        eos_ids = () if params.ignore_eos else self._eos_ids
        return holdings.install(waiting, match, pages, (*eos_ids, *params.stop_token_ids))

    def _try_lock(self, waiting: Waiting) -> Match | None:
        """The locked longest prefix, if there are pages for all the rest."""
        holdings, cache = self._holdings, self._holdings.cache
        match = cache.match(waiting.request.namespace, waiting.token_ids[:-1])
        needed = self._missing_pages(waiting, match) + self._reserved_pages(waiting)
        # Twice: locking the matched path turns pages that could be evicted into protected ones.
        if needed > holdings.takeable_pages:
            return None
        cache.lock(match.node)
        if needed > holdings.takeable_pages:
            cache.unlock(match.node)
            return None
        return match

    def _missing_pages(self, waiting: Waiting, match: Match) -> int:
        """Pages of the prompt that are not cached."""
        page_size = self._holdings.cache.page_size
        return -(-len(waiting.token_ids) // page_size) - len(match.pages)

    def _reserved_pages(self, waiting: Waiting) -> int:
        """Pages kept for what running requests, and this one, are expected to make.

        Nothing is kept where nobody runs: then the request may have it all.
        """
        rows = self._holdings.rows
        live = rows.live()
        if not len(live):
            return 0
        left = rows.limit[live] - np.maximum(rows.cached[live], rows.prefill_end[live])
        own = min(waiting.limit - len(waiting.token_ids), FORESEEN_TOKENS)
        tokens = int(np.minimum(left, FORESEEN_TOKENS).sum()) + own
        # Whatever the forecast, each row may be about to need its next page.
        return len(live) + int(tokens * self.forecast.share) // self._holdings.cache.page_size
