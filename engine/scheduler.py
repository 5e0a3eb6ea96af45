"""Which requests run in the next step.

`plan` takes a snapshot and moves the rows on as if its step had run; `commit` takes the tokens of
one such step, in launch order (engine/commit.py). Between the two, any number of later steps may
be planned. Knows no torch, no text and no clock.

Rules
- Only admitted rows are in a plan; a row is admitted with the pages of its whole prompt.
- The running request of the lowest rank (the oldest; with priorities, see engine/waiting.py) is
  retracted for no other but one of a lower rank, and alone it always fits: so everyone ends.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from engine.admission import Admission, Refusal
from engine.batch import Batch
from engine.commit import Committer
from engine.constraints import Constraints
from engine.holdings import Holdings, RowArray
from engine.logprobs import StepLogprobs
from engine.pages import PagePool
from engine.plan import Draft, StepPlan
from engine.policies import build_policy
from engine.prefix_cache import PrefixCache
from engine.pressure import Pressure
from engine.request import FAILURES, Finish, Int32Array, Request, StepOutput
from engine.rows import RowState
from engine.rules import rules_of, stop_ids_of
from engine.step_cost import StepCost
from engine.step_trace import Admitted, Refused, StepTrace
from engine.timeouts import NO_TIMEOUTS, Timeouts
from engine.waiting import OVERTAKINGS, Waiting, WaitingQueue

UNLIMITED: Final = 2**31 - 1


class Scheduler:
    """The order of work: who prefills, decodes and waits. Owned by the engine thread."""

    def __init__(
        self,
        *,
        pool: PagePool,
        cache: PrefixCache,
        max_running: int,
        max_model_len: int,
        prefill_budget: int | None,
        eos_ids: tuple[int, ...],
        vocab_size: int,
        policy: str = "fcfs",
        preemption_threshold: int | None = None,
        overtakings: int = OVERTAKINGS,
        timeouts: Timeouts = NO_TIMEOUTS,
        target_itl_s: float | None = None,
        trace_steps: int = 0,
        seed: int = 0,
    ) -> None:
        """
        policy                one of engine.config.SCHEDULE_POLICIES
        preemption_threshold  by how much the priority of a waiting request must be higher than a
                              running one's to take its place; None: nothing takes it
        overtakings           younger requests that may start while one waits
        target_itl_s          what a step that decodes is to take, prompts included, as far as
                              `observe` tells; None: prefill_budget alone limits it
        trace_steps           of how many steps `trace` tells the reasons; 0: there is none
        seed                  of the random policy
        """
        self.page_size = cache.page_size
        self.max_model_len = max_model_len
        if -(-max_model_len // self.page_size) > pool.capacity:
            raise ValueError(
                f"max_model_len is {max_model_len} tokens, but the KV pool holds "
                f"{pool.capacity * self.page_size}"
            )
        self.holdings = Holdings(
            pool=pool, cache=cache, max_running=max_running, max_model_len=max_model_len
        )
        self._rows = self.holdings.rows
        self._eos_ids = eos_ids
        self.admission = Admission(self.holdings)
        self.constraints = Constraints(self._rows, vocab_size)
        self.batch = Batch(self.holdings, self.constraints)
        self._committer = Committer(self.holdings, self.batch, self.constraints)
        self.waiting = WaitingQueue(build_policy(policy, self.holdings, seed), overtakings)
        self._timeouts = timeouts
        self._target_itl_s = target_itl_s
        self._step_cost = StepCost()
        self.trace = StepTrace(self.holdings, trace_steps) if trace_steps else None
        self.pressure = Pressure(
            self.holdings, self.batch, self.waiting, self.admission, self.trace,
            preemption_threshold,
        )  # fmt: skip
        self._prefill_budget = prefill_budget or UNLIMITED
        self._launched_step = 0

    # Arrival and departure

    def submit(self, request: Request) -> None:
        """Queues a request.

        Raises ValueError where it can never fit or its id is in use.
        """
        total = len(request.prompt_ids) + request.params.max_new_tokens
        if not len(request.prompt_ids) or request.params.max_new_tokens < 0:
            raise ValueError("a request needs at least one prompt token, and no fewer than 0 new")
        if total > self.max_model_len:
            raise ValueError(
                f"prompt and max_new_tokens are {total} tokens together, "
                f"more than the context of {self.max_model_len}"
            )
        if request.id in self.holdings.row_of or request.id in self.waiting:
            raise ValueError(f"request id {request.id} is in use")
        self.waiting.add(request)

    def end(self, request_id: int, finish: Finish, error: str | None = None) -> bool:
        """Ends a request in any phase; False where it is not, or no longer, known.

        error  what to tell the client, with one of the FAILURES
        """
        assert (error is not None) == (finish in FAILURES)
        if self.waiting.remove(request_id) is None:
            row = self.holdings.row_of.get(request_id)
            if row is None:
                return False
            self.batch.end(row)
            self.holdings.release()
        self._committer.tell_end(request_id, finish, error)
        return True

    def expire(self, now_s: float) -> None:
        """Ends what has become too old at this time, on the clock of `Request.arrived_s`."""
        for request_id, message in self._timeouts.expired(now_s, self.waiting, self._rows):
            self.end(request_id, Finish.TIMEOUT, message)

    @property
    def has_work(self) -> bool:
        return bool(self.holdings.row_of or self._committer.has_ended or len(self.waiting))

    @property
    def running(self) -> int:
        return len(self.holdings.row_of)

    @property
    def retractions(self) -> int:
        """Running requests that were sent back so far, for whatever reason."""
        return self.pressure.retractions

    def request_ids(self, rows: Sequence[int]) -> tuple[int, ...]:
        """Whose these rows are."""
        return tuple(int(self._rows.request_ids[row]) for row in rows)

    def check_integrity(self) -> None:
        """Asserts that every page has one owner and every row one state. Walks everything."""
        self.holdings.check_integrity()

    # Planning

    def plan(self) -> StepPlan | None:
        """The next step, or None where there is nothing that could be launched now."""
        self.pressure.preempt()
        draft = Draft()
        decode = self._plan_decode(draft)
        budget = self._budget_beside(len(decode))
        self._plan_prefill(draft, budget)
        copies = self.holdings.cache.take_copies()
        if not len(decode) and not draft.segments and not len(copies.words):
            return None
        self._launched_step += 1
        step = self._launched_step
        positions = self.batch.advance(decode, step)
        for row, *_ in (*draft.segments, *draft.loads):
            self._rows.last_step[row] = step
        writes = [*self.holdings.take_rewrites(), *draft.page_writes]
        masks = self.constraints.masks(draft.sampling_rows(), decode)
        if self.trace is not None:
            self.trace.planned(step, len(self.waiting), positions, draft.segments, budget)
        return draft.finish(
            step, decode, self.batch.is_same_decode(decode), positions, writes, masks, copies
        )

    def _plan_decode(self, draft: Draft) -> RowArray:
        """Rows that decode in this step; each has the page that its next position needs."""
        decode = self.batch.ready_to_decode()
        rows = self._rows
        short = decode[rows.cached[decode] == rows.pages[decode] * self.page_size]
        if not len(short):
            return decode
        grown = self._grow(short, draft)
        decode = self.batch.ready_to_decode()  # growing may have retracted some
        if len(grown) == len(short):
            return decode
        waits = np.isin(decode, short) & ~np.isin(decode, grown)
        return decode[~waits] if waits.any() else decode

    def _grow(self, short: RowArray, draft: Draft) -> RowArray:
        """Gives one page to each row of `short` for which there is one, the lowest rank first."""
        rows = self._rows
        short = short[rows.rank[short].argsort()]
        while len(short) > self.holdings.pages_in_sight and self.pressure.retract_one():
            short = short[rows.state[short] == RowState.DECODE]
        grown, indices, pages = self.holdings.grow(short)
        draft.write_pages(grown, indices, pages)
        return grown

    def _plan_prefill(self, draft: Draft, budget: int) -> None:
        for row in list(self.batch.prefilling):
            turn, first = int(self._rows.turn[row]), self.waiting.first
            if budget and first is not None and self.waiting.key_of(first) < turn:
                budget = self._admit(draft, budget, before=turn)
            if not self._load(row, draft) and budget:
                budget -= self._add_chunk(row, budget, draft)
        self._admit(draft, budget)

    def _admit(self, draft: Draft, budget: int, before: int | None = None) -> int:
        """Starts who may start; returns the prompt tokens that are left of the budget.

        before  a key: only those with lower ones
        """
        if budget == 0 or (not self._rows.free and not self.pressure.may_preempt):
            self._note_refusal(self.waiting.first, Refusal.ROWS if budget else Refusal.PREFILL)
            return budget
        for waiting in self.waiting.candidates():
            if before is not None and self.waiting.key_of(waiting) >= before:
                break
            admitted = self._try_admit(waiting, budget)
            if isinstance(admitted, Refusal):
                self._note_refusal(waiting, admitted)
                if admitted is Refusal.SIBLING:
                    continue
                if admitted is not Refusal.PREFILL:
                    self.pressure.blocked = waiting
                break  # nobody overtakes it, or it might wait for ever
            if self._start(admitted, waiting, draft) and not self._load(admitted, draft):
                budget -= self._add_chunk(admitted, budget, draft)
        return budget

    def _try_admit(self, waiting: Waiting, budget: int) -> int | Refusal:
        if budget == 0:
            return Refusal.PREFILL
        return self.admission.try_admit(waiting, waits=not self.waiting.is_due(waiting))

    def _note_refusal(self, waiting: Waiting | None, refusal: Refusal) -> None:
        if self.trace is not None and waiting is not None:
            notes = self.trace.notes
            notes.refused = notes.refused or Refused(waiting.request.id, refusal.value)

    def _budget_beside(self, decode_rows: int) -> int:
        """Prompt tokens that a step with so many decode rows may carry."""
        if self._target_itl_s is None or not decode_rows:
            return self._prefill_budget
        tokens = self._step_cost.tokens_within(self._target_itl_s, decode_rows)
        return self._prefill_budget if tokens is None else min(tokens, self._prefill_budget)

    def _start(self, row: int, waiting: Waiting, draft: Draft) -> bool:
        """Moves a request from the queue to the row it was given; False where it fails at once."""
        self.batch.start(row, self.waiting.turn_of(waiting))
        self.waiting.start(waiting)
        stop_ids = stop_ids_of(waiting.request, self._eos_ids)
        self._rows.set_stop_ids(row, stop_ids)
        failure = self.constraints.begin(row, waiting, stop_ids)
        if failure is not None:
            self.end(waiting.request.id, failure.finish, failure.message)
            return False
        if self.trace is not None:
            tokens, cached = len(waiting.token_ids), int(self._rows.cached[row])
            self.trace.notes.admitted.append(Admitted(waiting.request.id, tokens, cached))
        rules = rules_of(row, waiting, stop_ids)
        draft.join(row, waiting.request, self._rows.pages_of(row), rules)
        return True

    def _load(self, row: int, draft: Draft) -> bool:
        """Whether the row's next pages come from the host: then it computes in a later step."""
        before = self._rows.cached[row]
        loads = self.holdings.load(row)
        if self._rows.cached[row] > before:
            draft.loads.append((row, int(self._rows.cached[row])))
        return loads

    def _add_chunk(self, row: int, budget: int, draft: Draft) -> int:
        """Puts up to `budget` prompt tokens of the row into the step; returns how many."""
        start, end = self.batch.take_chunk(row, budget)
        completes = end == self._rows.prefill_end[row]
        draft.add_segment(row, start, self._rows.tokens[row, start:end], bool(completes))
        return end - start

    # Committing

    def commit(
        self,
        plan: StepPlan,
        token_ids: Int32Array,
        logprobs: StepLogprobs | None,
        made_s: float = 0.0,
    ) -> StepOutput:
        """Takes the tokens of the oldest step not yet committed.

        token_ids  [sampled] int32, parallel to plan.sample_rows
        made_s     when they came, for the output
        """
        forecast = self.admission.forecast
        return self._committer.commit(plan, token_ids, logprobs, forecast, made_s)

    def take_ended(self, now_s: float = 0.0) -> StepOutput | None:
        """What ended without a token since the last output, where no commit is there to tell it."""
        return self._committer.take_ended(now_s)

    def observe(self, plan: StepPlan, took_s: float, done_s: float) -> None:
        """Learns from what the step took on the device, where anybody will ask.

        done_s  when it was done, on the clock of `Request.arrived_s`
        """
        predicted_s = None
        if self._target_itl_s is not None:
            rows, tokens = len(plan.descriptor.decode_rows), len(plan.descriptor.prefill_tokens)
            if self.trace is not None:
                predicted_s = self._step_cost.predicted_s(rows, tokens)
            self._step_cost.observe(rows, tokens, took_s)
        if self.trace is not None:
            self.trace.done((self.holdings.fence.completed_step + 1, took_s, done_s, predicted_s))
