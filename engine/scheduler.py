"""Which requests run in the next step, and what a finished step means for them.

`plan` takes a snapshot and moves the rows on as if its step had run; `commit` takes the tokens of
one such step, in launch order. Between the two, any number of later steps may be planned. Knows no
torch, no text and no clock.

Rules
- Only admitted rows are in a plan; a row is admitted with the pages of its whole prompt.
- Results are committed against their own plan; a row that ended meanwhile drops its token.
- Whatever ends goes through `_end`, once, and is given back through the fence.
- The oldest running request is never retracted, and alone it always fits: so everyone ends.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from engine.descriptor import JOINED_WORDS
from engine.fence import Fence, Held
from engine.forecast import OutputForecast
from engine.pages import PagePool
from engine.plan import Draft, StepPlan, page_writes
from engine.prefix_cache import Match, PrefixCache
from engine.request import Finish, Int32Array, Request, Started, StepOutput
from engine.rows import Rows, RowState
from engine.waiting import Waiting, WaitingQueue

RowArray = NDArray[np.intp]
NO_ROWS: Final[RowArray] = np.empty(0, np.intp)
UNLIMITED: Final = 2**31 - 1
# Of one request's allowance, admission looks no further ahead: a chat without max_tokens may use
# the whole context and hardly ever does. Retraction is there for those that do.
FORESEEN_TOKENS: Final = 2048


class Scheduler:
    """Rows, pages, prefix cache and queue of one engine. Owned by the engine thread."""

    def __init__(
        self,
        *,
        pool: PagePool,
        cache: PrefixCache,
        max_running: int,
        max_model_len: int,
        prefill_budget: int | None,
        eos_ids: tuple[int, ...],
    ) -> None:
        self.page_size = cache.page_size
        self.max_model_len = max_model_len
        if -(-max_model_len // self.page_size) > pool.capacity:
            raise ValueError(
                f"max_model_len is {max_model_len} tokens, but the KV pool holds "
                f"{pool.capacity * self.page_size}"
            )
        self.rows = Rows(max_running, max_model_len, self.page_size)
        self.waiting = WaitingQueue()
        self.pool = pool
        self.cache = cache
        self.fence = Fence()
        self.forecast = OutputForecast()
        self.retractions = 0
        self._eos_ids = eos_ids
        self._prefill_budget = prefill_budget or UNLIMITED
        self._row_of: dict[int, int] = {}  # request id → row
        self._prefilling: list[int] = []  # rows, oldest first
        self._decoding: RowArray = NO_ROWS  # rows in state DECODE once refreshed
        self._decoding_is_stale = False
        self._joining: list[int] = []  # rows that decode from the next plan on
        self._previous_decode: RowArray = NO_ROWS  # what the last descriptor said
        self._rewrites: list[Int32Array] = []  # [n, 3] page writes that the next descriptor carries
        self._ended: list[tuple[int, Finish, str | None]] = []  # without a token; not yet told
        self._launched_step = 0
        self._completed_step = 0

    # Arrival and departure

    def submit(self, request: Request) -> None:
        """Queues a request.

        Raises ValueError where it can never fit or its id is in use.
        """
        total = len(request.prompt_ids) + request.params.max_new_tokens
        if not len(request.prompt_ids) or request.params.max_new_tokens < 1:
            raise ValueError("a request needs at least one prompt token and one new token")
        if total > self.max_model_len:
            raise ValueError(
                f"prompt and max_new_tokens are {total} tokens together, "
                f"more than the context of {self.max_model_len}"
            )
        if request.id in self._row_of or request.id in self.waiting:
            raise ValueError(f"request id {request.id} is in use")
        self.waiting.add(request)

    def abort(self, request_id: int, *, finish: Finish = Finish.ABORT) -> bool:
        """Ends a request in any phase; False where it is not, or no longer, known."""
        if self.waiting.remove(request_id) is None:
            row = self._row_of.get(request_id)
            if row is None:
                return False
            self._end(row)
            self._release()
        self._ended.append((request_id, finish, None))
        return True

    @property
    def has_work(self) -> bool:
        return bool(self._row_of or self._ended) or len(self.waiting) > 0

    @property
    def running(self) -> int:
        return len(self._row_of)

    # Planning

    def plan(self) -> StepPlan | None:
        """The next step, or None where there is nothing that could be launched now."""
        draft = Draft()
        decode = self._plan_decode(draft)
        self._plan_prefill(draft)
        if not len(decode) and not draft.segments:
            return None
        self._launched_step += 1
        step = self._launched_step
        positions = self._advance(decode, step)
        for row, *_ in draft.segments:
            self.rows.last_step[row] = step
        writes = [*self._rewrites, *draft.page_writes]
        self._rewrites = []
        return draft.finish(step, decode, self._is_same_decode(decode), positions, writes)

    def _is_same_decode(self, decode: RowArray) -> bool:
        same = decode is self._previous_decode and len(decode) > 0
        self._previous_decode = decode
        return same

    def _advance(self, decode: RowArray, step: int) -> Int32Array:
        """Moves decode rows one token on; returns the positions of their sampled tokens."""
        rows = self.rows
        positions: Int32Array = rows.cached[decode] + 1
        rows.cached[decode] = positions
        rows.last_step[decode] = step
        last = positions + 1 >= rows.limit[decode]
        if last.any():
            rows.state[decode[last]] = RowState.TAIL
            self._decoding_is_stale = True
        return positions

    def _refreshed_decoding(self) -> RowArray:
        if self._decoding_is_stale or self._joining:
            both = np.concatenate([self._decoding, np.asarray(self._joining, np.intp)])
            self._decoding = both[self.rows.state[both] == RowState.DECODE]
            self._joining = []
            self._decoding_is_stale = False
        return self._decoding

    def _plan_decode(self, draft: Draft) -> RowArray:
        """Rows that decode in this step; each has the page that its next position needs."""
        decode = self._refreshed_decoding()
        rows = self.rows
        short = decode[rows.cached[decode] == rows.pages[decode] * self.page_size]
        if not len(short):
            return decode
        grown = self._grow(short, draft)
        decode = self._refreshed_decoding()  # growing may have retracted some
        if len(grown) == len(short):
            return decode
        waits = np.isin(decode, short) & ~np.isin(decode, grown)
        return decode[~waits] if waits.any() else decode

    def _grow(self, short: RowArray, draft: Draft) -> RowArray:
        """Gives one page to each row of `short` for which there is one, oldest first."""
        rows = self.rows
        short = short[np.argsort(rows.order[short])]
        while len(short) > self._pages_in_sight() and self._retract_youngest():
            short = short[rows.state[short] == RowState.DECODE]
        count = min(len(short), self.pool.free_pages + self.cache.evictable_pages)
        pages = self._try_take(count)
        assert pages is not None
        grown = short[:count]
        draft.write_pages(grown, rows.pages[grown], pages)
        rows.page_table[grown, rows.pages[grown]] = pages
        rows.pages[grown] += 1
        return grown

    def _pages_in_sight(self) -> int:
        """Pages that can be taken now, or once the steps in flight are done."""
        return self.pool.free_pages + self.cache.evictable_pages + self.fence.pages

    def _try_take(self, count: int) -> Int32Array | None:
        missing = count - self.pool.free_pages
        if missing > 0:
            self.pool.give(self.cache.evict(missing))
        return self.pool.try_take(count)

    def _plan_prefill(self, draft: Draft) -> None:
        budget = self._prefill_budget
        for row in list(self._prefilling):
            if budget == 0:
                return
            budget -= self._add_chunk(row, budget, draft)
        while budget > 0 and self.rows.free:
            waiting = self.waiting.first()
            row_or_none = None if waiting is None else self._try_admit(waiting, draft)
            if row_or_none is None:
                return
            budget -= self._add_chunk(row_or_none, budget, draft)

    def _add_chunk(self, row: int, budget: int, draft: Draft) -> int:
        """Puts up to `budget` prompt tokens of the row into the step; returns how many."""
        rows = self.rows
        start, prefill_end = int(rows.cached[row]), int(rows.prefill_end[row])
        end = min(start + budget, prefill_end)
        completes = end == prefill_end
        draft.add_segment(row, start, rows.tokens[row, start:end], completes)
        rows.cached[row] = end
        if completes:
            self._prefilling.remove(row)
            if end + 1 < rows.limit[row]:
                rows.state[row] = RowState.DECODE
                self._joining.append(row)
            else:
                rows.state[row] = RowState.TAIL
        return end - start

    # Admission

    def _try_admit(self, waiting: Waiting, draft: Draft) -> int | None:
        """Gives the request a row and its prompt's pages, if that leaves enough for the others."""
        match = self.cache.match(waiting.request.namespace, waiting.token_ids[:-1])
        needed = -(-len(waiting.token_ids) // self.page_size) - len(match.pages)
        reserve = self._reserved_pages(waiting)
        # Twice: locking the matched path turns pages that could be evicted into protected ones.
        if needed + reserve > self.pool.free_pages + self.cache.evictable_pages:
            return None
        self.cache.lock(match.node)
        if needed + reserve > self.pool.free_pages + self.cache.evictable_pages:
            self.cache.unlock(match.node)
            return None
        pages = self._try_take(needed)
        assert pages is not None
        self.waiting.remove(waiting.request.id)
        return self._install(waiting, match, pages, draft)

    def _reserved_pages(self, waiting: Waiting) -> int:
        """Pages kept for what running requests, and this one, are expected to make.

        Nothing is kept where nobody runs: then the request may have it all.
        """
        rows = self.rows
        live = rows.live()
        if not len(live):
            return 0
        left = rows.limit[live] - np.maximum(rows.cached[live], rows.prefill_end[live])
        own = min(waiting.limit - len(waiting.token_ids), FORESEEN_TOKENS)
        tokens = int(np.minimum(left, FORESEEN_TOKENS).sum()) + own
        # Whatever the forecast, each row may be about to need its next page.
        return len(live) + int(tokens * self.forecast.share) // self.page_size

    def _install(self, waiting: Waiting, match: Match, pages: Int32Array, draft: Draft) -> int:
        rows, request, count = self.rows, waiting.request, len(waiting.token_ids)
        row = rows.take()
        held = len(match.pages) + len(pages)
        rows.state[row] = RowState.PREFILL
        rows.request_ids[row] = request.id
        rows.requests[row] = request
        rows.nodes[row] = match.node
        rows.valid[row] = rows.cached[row] = match.tokens
        rows.prefill_end[row] = count
        rows.limit[row] = waiting.limit
        rows.shared[row], rows.pages[row] = len(match.pages), held
        rows.page_table[row, :held] = np.concatenate([match.pages, pages])
        rows.tokens[row, :count] = waiting.token_ids
        rows.order[row] = waiting.order
        rows.started[row] = waiting.started
        rows.cached_tokens[row] = waiting.cached_tokens if waiting.started else match.tokens
        eos = () if request.params.ignore_eos else self._eos_ids
        rows.set_stop_ids(row, (*eos, *request.params.stop_token_ids))
        self._row_of[request.id] = row
        self._prefilling.append(row)
        draft.join(_joined_words(row, request))
        draft.write_pages(np.full(held, row), np.arange(held), rows.pages_of(row))
        return row

    # Committing

    def commit(self, plan: StepPlan, token_ids: Int32Array) -> StepOutput:
        """Takes the tokens of the oldest step not yet committed.

        token_ids  [sampled] int32, parallel to plan.sample_rows
        """
        assert plan.step == self._completed_step + 1
        self._completed_step = plan.step
        rows = self.rows
        rows.valid[plan.chunk_rows] = plan.chunk_ends
        sampled, positions = plan.sample_rows, plan.sample_positions
        alive = rows.state[sampled] != RowState.ENDED
        if not alive.all():
            sampled, positions, token_ids = sampled[alive], positions[alive], token_ids[alive]
        rows.tokens[sampled, positions] = token_ids
        rows.valid[sampled] = positions
        stopped = (rows.stop_ids[sampled] == token_ids[:, None]).any(axis=1)
        finishes = np.where(positions + 1 >= rows.limit[sampled], Finish.LENGTH, Finish.NONE)
        finishes = np.where(stopped, Finish.STOP, finishes).astype(np.uint8)
        request_ids = rows.request_ids[sampled]
        started = self._commit_prefilled(plan.prefilled_rows)
        for row in sampled[finishes != Finish.NONE].tolist():
            self._finish(row)
        self._release()
        return self._output(plan.step, request_ids, token_ids, finishes, started)

    def _commit_prefilled(self, prefilled: tuple[int, ...]) -> tuple[Started, ...]:
        """Shares each computed prompt at once, so that the next request with it finds it."""
        rows, started = self.rows, []
        for row in prefilled:
            request = rows.requests[row]
            if rows.state[row] == RowState.ENDED or request is None:
                continue
            self._share(row)
            if not rows.started[row]:
                rows.started[row] = True
                started.append(Started(request, int(rows.cached_tokens[row])))
        return tuple(started)

    def take_ended(self) -> StepOutput | None:
        """What ended without a token since the last output, where no commit is there to tell it."""
        if not self._ended:
            return None
        none = np.empty(0, np.int32)
        ids, finishes = np.empty(0, np.int64), np.empty(0, np.uint8)
        return self._output(self._completed_step, ids, none, finishes, ())

    def _output(
        self,
        step: int,
        request_ids: NDArray[np.int64],
        token_ids: Int32Array,
        finishes: NDArray[np.uint8],
        started: tuple[Started, ...],
    ) -> StepOutput:
        if not self._ended:
            return StepOutput(step, request_ids, token_ids, finishes, started)
        ended, self._ended = self._ended, []
        return StepOutput(
            step,
            np.concatenate([request_ids, np.array([e[0] for e in ended], np.int64)]),
            np.concatenate([token_ids, np.full(len(ended), -1, np.int32)]),
            np.concatenate([finishes, np.array([e[1] for e in ended], np.uint8)]),
            started,
            tuple((e[0], e[2]) for e in ended if e[2] is not None),
        )

    # Sharing and giving back

    def _share(self, row: int) -> None:
        """Hands the row's computed whole pages to the cache.

        Pages that the cache already had for the same tokens replace the row's own, in its page
        table here and, with the next descriptor, on the device; the duplicates are free after the
        fence.
        """
        rows = self.rows
        request, node = rows.requests[row], rows.nodes[row]
        assert request is not None and node is not None
        whole = int(rows.valid[row]) // self.page_size
        shared = int(rows.shared[row])
        if whole <= shared:
            return
        table = rows.page_table[row]
        tokens = rows.tokens[row, : whole * self.page_size]
        inserted = self.cache.insert(request.namespace, tokens, table[:whole])
        taken = len(inserted.pages)
        if taken <= shared:
            return
        changed = shared + np.nonzero(table[shared:taken] != inserted.pages[shared:])[0]
        if len(changed):
            self.fence.hold(Held(int(rows.last_step[row]), table[changed].copy()))
            table[changed] = inserted.pages[changed]
            if rows.state[row] != RowState.ENDED:
                self._rewrites.append(
                    page_writes(np.full(len(changed), row), changed, table[changed])
                )
        self.cache.lock(inserted.node)
        self.cache.unlock(node)
        rows.nodes[row] = inserted.node
        rows.shared[row] = taken

    def _finish(self, row: int) -> None:
        request = self.rows.requests[row]
        assert request is not None
        made = int(self.rows.valid[row]) + 1 - len(request.prompt_ids)
        self.forecast.finished(made, request.params.max_new_tokens)
        self._end(row)

    def _end(self, row: int) -> None:
        """The one way out for a running request: its row, pages and lock go behind the fence."""
        rows = self.rows
        assert rows.state[row] not in (RowState.FREE, RowState.ENDED)
        if rows.state[row] == RowState.PREFILL:
            self._prefilling.remove(row)
        rows.state[row] = RowState.ENDED
        self._decoding_is_stale = True
        del self._row_of[int(rows.request_ids[row])]
        # A rewrite still to be sent would hit the row's next owner.
        self._rewrites = [writes for writes in self._rewrites if writes[0, 0] != row]
        self._share(row)
        own = rows.pages_of(row)[rows.shared[row] :].copy()
        unlocks = int(rows.shared[row])
        self.fence.hold(Held(int(rows.last_step[row]), own, row, rows.nodes[row], unlocks))

    def _release(self) -> None:
        for held in self.fence.release(self._completed_step):
            self.pool.give(held.pages)
            if held.node is not None:
                self.cache.unlock(held.node)
            if held.row is not None:
                self.rows.give(held.row)

    def _retract_youngest(self) -> bool:
        """Sends the youngest running request back to the queue; False where only one runs."""
        rows = self.rows
        live = rows.live()
        if len(live) <= 1:
            return False
        row = int(live[np.argmax(rows.order[live])])
        request = rows.requests[row]
        assert request is not None
        self.waiting.put_back(
            Waiting(
                request,
                rows.tokens[row, : rows.known_tokens(row)].copy(),
                int(rows.order[row]),
                bool(rows.started[row]),
                int(rows.cached_tokens[row]),
            )
        )
        self._end(row)
        self._release()
        self.retractions += 1
        self.forecast.retracted()
        return True

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
        assert sorted(self._row_of.values()) == live, "rows and requests differ"
        assert self.fence.rows + len(live) + rows.free == rows.count, "a row is lost"
        for row in live:
            assert rows.valid[row] <= rows.cached[row] < rows.limit[row]
            assert rows.cached[row] <= rows.pages[row] * self.page_size
            assert rows.shared[row] <= rows.pages[row]


def _joined_words(row: int, request: Request) -> Int32Array:
    params = request.params
    words = np.zeros(JOINED_WORDS, np.int32)
    floats = words.view(np.float32)
    words[0], words[2] = row, min(params.top_k, UNLIMITED)
    floats[1], floats[3], floats[4] = params.temperature, params.top_p, params.min_p
    words[5:7] = np.array([request.seed], np.uint64).view(np.int32)
    return words
