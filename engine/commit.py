"""What a finished step means: tokens for its rows, the ends of some, and an output that says so.

Knows neither the queue nor how steps are planned.

Rules
- Results are committed against their own plan; a row that ended meanwhile drops its token.
- Every request's end is told once: by its last token, or by `take_ended` where there is none.
"""

from dataclasses import replace

import numpy as np

from engine.batch import Batch
from engine.constraints import Constraints
from engine.forecast import OutputForecast
from engine.holdings import Holdings
from engine.logprobs import StepLogprobs, sampled_logprobs, take_prompt_logprobs
from engine.plan import StepPlan
from engine.request import Finish, Int32Array, Logprobs, Started, StepOutput
from engine.rows import RowState


class Committer:
    """Takes steps' tokens, in launch order. Owned by the engine thread."""

    def __init__(
        self,
        holdings: Holdings,
        batch: Batch,
        constraints: Constraints,
    ) -> None:
        self._holdings = holdings
        self._rows = holdings.rows
        self._batch = batch
        self._constraints = constraints
        self._ended: list[tuple[int, Finish, str | None]] = []  # without a token; not yet told

    @property
    def has_ended(self) -> bool:
        """Whether there are ends that no output has told yet."""
        return bool(self._ended)

    def commit(
        self,
        plan: StepPlan,
        token_ids: Int32Array,
        logprobs: StepLogprobs | None,
        forecast: OutputForecast,
        made_s: float,
    ) -> StepOutput:
        """Takes the tokens of the oldest step not yet committed.

        token_ids  [sampled] int32, parallel to plan.sample_rows
        forecast   is told how long the answers are that end
        made_s     when the tokens came, for the output
        """
        self._holdings.fence.complete(plan.step)
        rows = self._rows
        rows.valid[plan.chunk_rows] = plan.chunk_ends
        sampled, positions = plan.sample_rows, plan.sample_positions
        gone = (rows.state[sampled] == RowState.ENDED).nonzero()[0]
        if len(gone):
            sampled, positions = np.delete(sampled, gone), np.delete(positions, gone)
            token_ids = np.delete(token_ids, gone)
        rows.tokens[sampled, positions] = token_ids
        rows.valid[sampled] = positions
        stopped, full = rows.is_stop_id(sampled, token_ids), positions + 1 >= rows.limit[sampled]
        finishes = np.full(len(sampled), Finish.NONE, np.uint8)
        finishes[full] = Finish.LENGTH
        finishes[stopped] = Finish.STOP
        request_ids = rows.request_ids[sampled]
        failed = self._constraints.commit(sampled, token_ids, full | stopped)
        for index, failure in failed:
            finishes[index] = failure.finish
        errors = tuple((int(request_ids[index]), each.message) for index, each in failed)
        told = () if logprobs is None else self._commit_logprobs(plan, logprobs)
        started = self._commit_prefilled(plan.prefilled_rows)
        for row in sampled[finishes.nonzero()[0]].tolist():
            self._finish(row, forecast)
        self._holdings.release()
        return self._with_ended(
            StepOutput(plan.step, request_ids, token_ids, finishes, started, errors, told, made_s)
        )

    def tell_end(self, request_id: int, finish: Finish, error: str | None) -> None:
        """The next output says that the request ended, without a token."""
        self._ended.append((request_id, finish, error))

    def take_ended(self, now_s: float) -> StepOutput | None:
        """What ended without a token since the last output, where no commit is there to tell it."""
        if not self._ended:
            return None
        nothing = np.empty(0, np.int64), np.empty(0, np.int32), np.empty(0, np.uint8)
        step = self._holdings.fence.completed_step
        return self._with_ended(StepOutput(step, *nothing, made_s=now_s))

    def _commit_logprobs(
        self, plan: StepPlan, logprobs: StepLogprobs
    ) -> tuple[tuple[int, Logprobs], ...]:
        take_prompt_logprobs(logprobs, self._rows)
        return tuple(sampled_logprobs(logprobs, plan, self._rows))

    def _commit_prefilled(self, prefilled: tuple[int, ...]) -> tuple[Started, ...]:
        """Shares each computed prompt at once, so that the next request with it finds it."""
        rows, started = self._rows, []
        for row in prefilled:
            request = rows.requests[row]
            if rows.state[row] == RowState.ENDED or request is None:
                continue
            self._holdings.share_prompt(row)
            if not rows.started[row]:
                rows.started[row] = True
                parts = rows.prompt_logprobs[row]
                of_prompt = Logprobs.joined(parts) if parts else None
                cached, from_host = int(rows.cached_tokens[row]), int(rows.host_tokens[row])
                started.append(Started(request, cached, of_prompt, host_tokens=from_host))
        return tuple(started)

    def _finish(self, row: int, forecast: OutputForecast) -> None:
        request = self._rows.requests[row]
        assert request is not None
        made = int(self._rows.valid[row]) + 1 - len(request.prompt_ids)
        forecast.finished(made, max(1, request.params.max_new_tokens))
        self._batch.end(row)

    def _with_ended(self, output: StepOutput) -> StepOutput:
        if not self._ended:
            return output
        ended, self._ended = self._ended, []
        ids, finishes = np.array([e[0] for e in ended]), np.array([e[1] for e in ended], np.uint8)
        no_tokens = np.full(len(ended), -1, np.int32)
        return replace(
            output,
            request_ids=np.concatenate([output.request_ids, ids]),
            token_ids=np.concatenate([output.token_ids, no_tokens]),
            finishes=np.concatenate([output.finishes, finishes]),
            errors=output.errors + tuple((e[0], e[2]) for e in ended if e[2] is not None),
        )
