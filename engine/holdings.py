"""What running requests hold: a row, pages and a lock in the prefix cache each.

Knows neither the order of work nor when a request ends; only how it gets and gives back.

Rules
- A request gets everything for its prompt at once, in `install`; a page more at a time in `grow`.
- Whatever ends goes through `end`, once, and comes back in `release`, after the fence.
"""

import numpy as np
from numpy.typing import NDArray

from engine.fence import Fence, Held
from engine.pages import PagePool
from engine.plan import page_writes
from engine.prefix_cache import Match, PrefixCache
from engine.producers import Producers
from engine.request import Int32Array
from engine.rows import Rows, RowState
from engine.waiting import Waiting

RowArray = NDArray[np.intp]


class Holdings:
    """Rows, page pool, prefix cache and fence. Owned by the engine thread."""

    def __init__(
        self, *, pool: PagePool, cache: PrefixCache, max_running: int, max_model_len: int
    ) -> None:
        self.pool = pool
        self.cache = cache
        self.rows = Rows(max_running, max_model_len, cache.page_size)
        self.fence = Fence()
        self.row_of: dict[int, int] = {}  # request id → row
        # Grows whenever a request that could not be admitted might be: pages came back, or others
        # of its prompt's pages are cached.
        self.changes = 0
        self.evicted_pages = 0  # since the engine started
        self.producers = Producers(cache.page_size)
        self._rewrites: list[Int32Array] = []  # [n, 3] page writes that the next descriptor carries

    @property
    def takeable_pages(self) -> int:
        """Pages that can be taken now."""
        return self.pool.free_pages + self.cache.evictable_pages

    @property
    def pages_in_sight(self) -> int:
        """Pages that can be taken now, or once the steps in flight are done."""
        return self.takeable_pages + self.fence.pages

    def take_pages(self, count: int) -> Int32Array:
        """[count] pages, no more than `takeable_pages`; what the cache holds goes last."""
        missing = count - self.pool.free_pages
        if missing > 0:
            evicted = self.cache.evict(missing)
            self.evicted_pages += len(evicted)
            self.pool.give(evicted)
        pages = self.pool.try_take(count)
        assert pages is not None
        return pages

    def take_rewrites(self) -> list[Int32Array]:
        """[n, 3] page writes, for the next descriptor and no other."""
        rewrites, self._rewrites = self._rewrites, []
        return rewrites

    # Getting

    def install(self, waiting: Waiting, match: Match, pages: Int32Array) -> int:
        """Gives the request a row, with the matched pages, which are locked, and its own."""
        rows, request, count = self.rows, waiting.request, len(waiting.token_ids)
        row = rows.take()
        held = len(match.pages) + len(pages)
        rows.state[row] = RowState.PREFILL
        rows.request_ids[row] = request.id
        rows.requests[row] = request
        rows.nodes[row] = match.node
        rows.valid[row] = rows.cached[row] = match.tokens
        rows.load_end[row] = match.tokens + match.host_tokens
        rows.prefill_end[row] = count
        rows.limit[row] = waiting.limit
        rows.shared[row], rows.pages[row] = len(match.pages), held
        rows.page_table[row, :held] = np.concatenate([match.pages, pages])
        rows.tokens[row, :count] = waiting.token_ids
        rows.order[row] = waiting.order
        rows.priority[row], rows.rank[row] = waiting.priority, waiting.rank
        rows.started[row] = waiting.started
        rows.cached_tokens[row] = waiting.cached_tokens if waiting.started else match.tokens
        rows.host_tokens[row] = waiting.host_tokens if waiting.started else 0
        self.row_of[request.id] = row
        if self.cache.keeps:
            self.producers.add(row, request.namespace, waiting.token_ids)
        return row

    def load(self, row: int) -> bool:
        """Loads the next pages of the row's prompt from the host, as many as this step may.

        False where nothing is left to load: the rest is to be computed.
        """
        rows, cache = self.rows, self.cache
        cached, end = int(rows.cached[row]), int(rows.load_end[row])
        if cached >= end or not cache.copies_left:
            return cached < end
        request, first = rows.requests[row], cached // cache.page_size
        assert request is not None
        pages = rows.page_table[row, first : end // cache.page_size]
        loaded = cache.load(request.namespace, rows.tokens[row, :end], first, pages)
        if not loaded:  # it was dropped to make room
            rows.load_end[row] = cached
            return False
        rows.cached[row] += loaded * cache.page_size
        if not rows.started[row]:
            rows.cached_tokens[row] += loaded * cache.page_size
            rows.host_tokens[row] += loaded * cache.page_size
        return True

    def grow(self, short: RowArray) -> tuple[RowArray, Int32Array, Int32Array]:
        """One page more for as many of `short` as there are pages.

        Those rows, the indices in their page tables, and the pages.
        """
        rows = self.rows
        grown = short[: self.takeable_pages]
        pages, indices = self.take_pages(len(grown)), rows.pages[grown]
        rows.page_table[grown, indices] = pages
        rows.pages[grown] = indices + 1
        return grown, indices, pages

    # Sharing

    def share_prompt(self, row: int) -> None:
        """Hands the pages of the row's prompt, which is computed, to the cache."""
        self.producers.remove(row)
        self._share(row)

    def _share(self, row: int) -> None:
        """Hands the row's computed whole pages to the cache.

        Pages that the cache already had for the same tokens replace the row's own, in its page
        table here and, with the next descriptor, on the device; the duplicates are free after the
        fence.
        """
        rows = self.rows
        request, node = rows.requests[row], rows.nodes[row]
        assert request is not None and node is not None
        page_size, shared = self.cache.page_size, int(rows.shared[row])
        whole = int(rows.valid[row]) // page_size
        if whole <= shared:
            return
        table = rows.page_table[row]
        tokens = rows.tokens[row, : whole * page_size]
        inserted = self.cache.insert(request.namespace, tokens, table[:whole])
        taken = len(inserted.pages)
        if taken <= shared:
            return
        changed = shared + np.nonzero(table[shared:taken] != inserted.pages[shared:])[0]
        if len(changed):
            self._replace(row, changed, inserted.pages[changed])
        self.cache.lock(inserted.node)
        self.cache.unlock(node)
        rows.nodes[row] = inserted.node
        rows.shared[row] = taken
        self.changes += 1

    def _replace(self, row: int, indices: NDArray[np.intp], pages: Int32Array) -> None:
        rows = self.rows
        table = rows.page_table[row]
        self.fence.hold(Held(int(rows.last_step[row]), table[indices].copy()))
        table[indices] = pages
        if rows.state[row] != RowState.ENDED:
            self._rewrites.append(page_writes(np.full(len(indices), row), indices, pages))

    # Giving back

    def end(self, row: int) -> None:
        """The one way out for a running request: its row, pages and lock go behind the fence."""
        rows = self.rows
        assert rows.state[row] not in (RowState.FREE, RowState.ENDED)
        rows.state[row] = RowState.ENDED
        del self.row_of[int(rows.request_ids[row])]
        # A rewrite still to be sent would hit the row's next owner.
        self._rewrites = [writes for writes in self._rewrites if writes[0, 0] != row]
        self.share_prompt(row)
        own = rows.pages_of(row)[rows.shared[row] :].copy()
        unlocks = int(rows.shared[row])
        self.fence.hold(Held(int(rows.last_step[row]), own, row, rows.nodes[row], unlocks))

    def flush_cache(self) -> int:
        """Gives back every cached page under no lock; how many. No launched step names any."""
        pages = self.cache.clear()
        self.pool.give(pages)
        self.changes += 1
        return len(pages)

    def release(self) -> None:
        """Gives back what no launched step names any more."""
        for held in self.fence.release():
            self.pool.give(held.pages)
            if held.node is not None:
                self.cache.unlock(held.node)
            if held.row is not None:
                self.rows.give(held.row)
            self.changes += 1

    # Proof

    def check_integrity(self) -> None:
        """Asserts that every page has one owner and every row one state. Walks everything."""
        rows = self.rows
        self.pool.check_integrity()
        self.cache.check_integrity()
        live = rows.live().tolist()
        owned = [rows.pages_of(row)[rows.shared[row] :] for row in live]
        everyone = np.concatenate([*owned, *self.fence.all_pages(), self.cache.all_pages()])
        assert len(np.unique(everyone)) == len(everyone), "a page has two owners"
        assert 0 not in everyone, "the dummy page has an owner"
        assert self.pool.free_pages + len(everyone) == self.pool.capacity, "a page is lost"
        assert sorted(self.row_of.values()) == live, "rows and requests differ"
        assert self.fence.rows + len(live) + rows.free == rows.count, "a row is lost"
        for row in live:
            assert rows.valid[row] <= rows.cached[row] < rows.limit[row]
            assert rows.cached[row] <= rows.pages[row] * self.cache.page_size
            assert rows.shared[row] <= rows.pages[row]
