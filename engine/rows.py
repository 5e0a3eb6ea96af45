"""Running requests as a struct of arrays: one row each, a step is a few vector operations.

Knows neither pages' owners nor the order of work: that is the scheduler's.

Lengths of a row, all in tokens
  [0, valid)       computed by a completed step: may become a prefix of others
  [0, cached)      computed once every launched step is done
  cached + 1       tokens that exist on the device once the prompt is computed: a decode step takes
                   the last one as its input
  limit            prompt + max_new_tokens, which count as 1 at least: no position from here on is
                   ever computed
Pages of a row
  [0, shared)      belong to the prefix cache; the row's lock keeps them
  [shared, pages)  belong to the row
"""

import enum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from engine.prefix_cache import Node
from engine.request import Int32Array, Logprobs, Request

STOP_IDS: Final = 4  # room for a model's EOS ids; a request with more makes every step slower


class RowState(enum.IntEnum):
    """FREE → PREFILL → DECODE → TAIL → ENDED → FREE; ENDED from anywhere but FREE."""

    FREE = 0
    PREFILL = 1  # some of its prompt is still to be launched
    DECODE = 2  # in every step
    TAIL = 3  # its last step is launched; only commits are to come
    ENDED = 4  # finished, aborted or retracted; waits for the fence


class Rows:
    """The arrays. Owned by the engine thread.

    Every array is indexed by row; a row that is FREE holds stale values that nobody reads.
    """

    def __init__(self, count: int, max_model_len: int, page_size: int) -> None:
        self.count = count
        self.max_pages = -(-max_model_len // page_size)
        self.state = np.zeros(count, np.uint8)
        self.request_ids = np.zeros(count, np.int64)
        self.valid = np.zeros(count, np.int32)
        self.cached = np.zeros(count, np.int32)
        self.load_end = np.zeros(count, np.int32)  # up to here the prompt may come from the host
        self.prefill_end = np.zeros(count, np.int32)  # prompt, and what a retracted row had made
        self.limit = np.zeros(count, np.int32)
        self.pages = np.zeros(count, np.int32)
        self.shared = np.zeros(count, np.int32)
        self.last_step = np.zeros(count, np.int64)  # the last launched step that names the row
        # A row's ids are a column, so that rows are compared at once; -1, never sampled, pads it.
        self._stop_ids = np.full((STOP_IDS, count), -1, np.int32)
        self._stop_counts = np.zeros(count, np.int32)
        self.most_stop_ids = STOP_IDS  # as many as the row in use with the most ids has
        self.page_table = np.zeros((count, self.max_pages), np.int32)
        # One more than are ever computed; touched memory only is resident.
        self.tokens = np.zeros((count, max_model_len + 1), np.int32)
        self.requests: list[Request | None] = [None] * count
        self.nodes: list[Node | None] = [None] * count  # the locked node of the prefix cache
        self.cached_tokens = np.zeros(count, np.int32)  # prompt tokens that were a cache hit
        self.host_tokens = np.zeros(count, np.int32)  # of these, from host memory
        self.order = np.zeros(count, np.int64)  # arrival order
        self.priority = np.zeros(count, np.int32)  # 0 where the policy does not look at it
        self.rank = np.zeros(count, np.int64)  # as in Waiting: the lowest is never retracted
        self.turn = np.zeros(count, np.int64)  # whose prompt goes first: see WaitingQueue.turn_of
        self.started = np.zeros(count, np.bool_)  # its first token was committed
        self.prompt_logprobs: list[list[Logprobs]] = [[] for _ in range(count)]
        self._free = list(range(count - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """A FREE row. The caller fills every array of it."""
        return self._free.pop()

    def give(self, row: int) -> None:
        """ENDED → FREE: no launched step names the row any more."""
        assert self.state[row] == RowState.ENDED
        self.state[row] = RowState.FREE
        self.requests[row] = None
        self.nodes[row] = None
        self.prompt_logprobs[row] = []
        if self._stop_counts[row] > STOP_IDS:
            self._stop_counts[row] = 0
            self.most_stop_ids = max(STOP_IDS, int(self._stop_counts.max()))
        self._free.append(row)

    def set_stop_ids(self, row: int, ids: tuple[int, ...]) -> None:
        """The ids that end the row, in any number."""
        missing = len(ids) - len(self._stop_ids)
        if missing > 0:
            self._stop_ids = np.pad(self._stop_ids, ((0, missing), (0, 0)), constant_values=-1)
        self._stop_ids[:, row] = -1
        self._stop_ids[: len(ids), row] = ids
        self._stop_counts[row] = len(ids)
        self.most_stop_ids = max(self.most_stop_ids, len(ids))

    def is_stop_id(self, rows: NDArray[np.intp], token_ids: Int32Array) -> NDArray[np.bool_]:
        """[n]: whether token_ids[i] ends rows[i]."""
        ids = self._stop_ids[: self.most_stop_ids].take(rows, axis=1)
        ends: NDArray[np.bool_] = (ids == token_ids).any(axis=0)
        return ends

    def known_tokens(self, row: int) -> int:
        """Tokens of the row that the host knows: prompt and committed output."""
        return max(int(self.prefill_end[row]), int(self.valid[row]) + 1)

    def pages_of(self, row: int) -> Int32Array:
        """[pages] int32, a view."""
        return self.page_table[row, : self.pages[row]]

    def live(self) -> NDArray[np.intp]:
        """Rows that hold pages and are not ENDED."""
        in_use = (self.state != RowState.FREE) & (self.state != RowState.ENDED)
        return np.nonzero(in_use)[0]
