"""Sends running requests back to the queue, where pages are short or somebody urgent waits.

Which of them goes is engine/retraction.py's to say. Knows neither steps nor how they are planned.
"""

import numpy as np

from engine.admission import Admission
from engine.batch import Batch
from engine.holdings import Holdings
from engine.retraction import Retraction, first_to_go, lost_tokens, preemptible, retractable
from engine.step_trace import Retracted, StepTrace
from engine.waiting import Waiting, WaitingQueue


class Pressure:
    """Takes rows and pages from those that run. Owned by the engine thread."""

    def __init__(
        self,
        holdings: Holdings,
        batch: Batch,
        waiting: WaitingQueue,
        admission: Admission,
        trace: StepTrace | None,
        threshold: int | None,
    ) -> None:
        """threshold  as Scheduler's preemption_threshold"""
        self.blocked: Waiting | None = None  # there was no room for it in the last plan
        self.retractions = 0
        self._holdings, self._rows = holdings, holdings.rows
        self._page_size = holdings.cache.page_size
        self._batch, self._waiting, self._admission = batch, waiting, admission
        self._trace, self._threshold = trace, threshold

    @property
    def may_preempt(self) -> bool:
        """Whether a waiting request may take a running one's place."""
        return self._threshold is not None

    def retract_one(self) -> bool:
        """Sends a running request back for its pages; False where none may be."""
        candidates = retractable(self._rows)
        if not len(candidates):
            return False
        self._retract(first_to_go(self._rows, candidates, self._page_size), Retraction.PAGES)
        self._admission.forecast.retracted()
        return True

    def preempt(self) -> None:
        """Sends one of much lower priority back for the request that there was no room for.

        Only if that helps, and nothing is coming back anyway. One at a time: what it held comes
        back after the fence, and then the request is tried again.
        """
        threshold, rows, waiting = self._threshold, self._rows, self.blocked
        self.blocked = None
        if threshold is None or waiting is None or len(self._holdings.fence):
            return
        if waiting.request.id not in self._waiting:
            return  # it has ended
        if rows.free and self._admission.would_fit(waiting, 0):
            return  # what it needs has come back since
        candidates = preemptible(rows, waiting, threshold)
        # It would start before the other again, and be sent back again, and so on.
        would_be_due = [self._waiting.would_be_due(int(order)) for order in rows.order[candidates]]
        candidates = candidates[~np.array(would_be_due, np.bool_)]
        pages = int(rows.pages[candidates].sum())
        if len(candidates) and self._admission.would_fit(waiting, pages):
            row = first_to_go(rows, candidates, self._page_size)
            self._retract(row, Retraction.PREEMPTION, waiting.request.id)

    def _retract(self, row: int, reason: Retraction, for_id: int | None = None) -> None:
        """Sends a running request back to the queue, with the tokens that it has made.

        for_id  the request that it makes room for, where that is one
        """
        rows = self._rows
        request = rows.requests[row]
        assert request is not None
        if self._trace is not None:
            lost = int(lost_tokens(rows, np.array([row]), self._page_size)[0])
            self._trace.notes.retracted.append(Retracted(request.id, reason.value, lost, for_id))
        self._waiting.put_back(
            Waiting(
                request,
                rows.tokens[row, : rows.known_tokens(row)].copy(),
                int(rows.order[row]),
                started=bool(rows.started[row]),
                cached_tokens=int(rows.cached_tokens[row]),
                host_tokens=int(rows.host_tokens[row]),
                priority=int(rows.priority[row]),
                retracted=True,
            )
        )
        self._batch.end(row)
        self._holdings.release()
        self.retractions += 1
