"""Mini-SGLang's rules of scheduling in our scheduler's words, to compare with.

Prefill goes before decode: a step that computes prompts decodes for nobody. A request starts only
if memory remains for all the tokens that it, and everyone who runs, may make; so nothing is ever
retracted. Nobody waits for an equal prompt that is being computed.
"""

from typing import Any

from engine.admission import Admission, Refusal
from engine.batch import NO_ROWS
from engine.holdings import RowArray
from engine.plan import Draft
from engine.scheduler import Scheduler
from engine.waiting import Waiting


class ReservingAdmission(Admission):
    """Reserves whole allowances. Owned by the engine thread."""

    def try_admit(self, waiting: Waiting, *, waits: bool = True) -> int | Refusal:
        return super().try_admit(waiting, waits=False)

    def _reserved_pages(self, waiting: Waiting) -> int:
        rows, page_size = self._holdings.rows, self._holdings.cache.page_size
        live = rows.live()
        theirs = -(-rows.limit[live] // page_size) - rows.pages[live]
        own = -(-waiting.limit // page_size) - -(-len(waiting.token_ids) // page_size)
        return int(theirs.sum()) + own


class PrefillFirst(Scheduler):
    """Computes prompts before it decodes. Owned by the engine thread."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.admission = ReservingAdmission(self.holdings)

    def _plan_decode(self, draft: Draft) -> RowArray:
        self.batch.ready_to_decode()  # in each plan: rows that have ended go before others get them
        super()._plan_prefill(draft, self._budget_beside(0))
        return NO_ROWS if draft.segments else super()._plan_decode(draft)

    def _plan_prefill(self, draft: Draft, budget: int) -> None:
        """Done before decoding."""
