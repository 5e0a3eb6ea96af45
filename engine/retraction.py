"""Which running request is sent back to the queue where memory or a row is short.

Knows only rows; the scheduler says when.

Rules
- The running request of the lowest rank is never sent back, but for a waiting one of a rank that is
  lower still, which then runs. Only a bounded number of later requests ever get a lower rank than
  one, so it comes to its end, and then the next does: everyone ends.
- A row whose last step is launched is not sent back either: it is about to give its pages back.
"""

import enum

import numpy as np
from numpy.typing import NDArray

from engine.rows import Rows, RowState
from engine.waiting import Waiting

RowArray = NDArray[np.intp]


class Retraction(enum.Enum):
    """Why one is sent back, in words for people."""

    PAGES = "no page is left for those that decode"
    PREEMPTION = "a waiting request is that much more urgent"


def retractable(rows: Rows) -> RowArray:
    """Rows that may be sent back for their pages."""
    candidates = _going_on(rows)
    return (
        np.delete(candidates, np.argmin(rows.rank[candidates])) if len(candidates) else candidates
    )


def preemptible(rows: Rows, waiting: Waiting, threshold: int) -> RowArray:
    """Rows that may be sent back for the sake of a waiting request.

    threshold  by how much its priority is higher, at least
    """
    candidates = _going_on(rows)
    is_lower = rows.priority[candidates] <= waiting.priority - threshold
    # Others would be back in the queue before it: they came so much earlier.
    is_later = rows.rank[candidates] > waiting.rank
    return candidates[is_lower & is_later]


def first_to_go(rows: Rows, candidates: RowArray, page_size: int) -> int:
    """The one of the lowest priority; then the one that loses least; then the youngest.

    candidates  at least one row
    """
    lost = lost_tokens(rows, candidates, page_size)
    by_need = np.lexsort((-rows.order[candidates], lost, rows.priority[candidates]))
    return int(candidates[by_need[0]])


def lost_tokens(rows: Rows, candidates: RowArray, page_size: int) -> NDArray[np.int32]:
    """[n] What each has computed and does not share with the prefix cache.

    Tokens that are computed again once their pages were given to others.
    """
    lost: NDArray[np.int32] = rows.cached[candidates] - rows.shared[candidates] * page_size
    return lost


def _going_on(rows: Rows) -> RowArray:
    """Rows that have steps left to be launched."""
    return np.nonzero((rows.state == RowState.PREFILL) | (rows.state == RowState.DECODE))[0]
