"""Why each step was what it was: the last steps' decisions, as they were taken.

Whoever decides notes the reason at the spot; nothing here works one out. Knows no clock.

The file format is JSON lines, one step each: the fields of `StepRecord`, nested ones as objects.
"""

import json
from collections import deque
from collections.abc import Callable
from itertools import islice, pairwise
from typing import Any, Final, NamedTuple

from engine.holdings import Holdings
from engine.request import Int32Array


class Chunk(NamedTuple):
    """Part of a request's prompt that a step computes."""

    request_id: int
    start: int  # position of its first token
    tokens: int


class Admitted(NamedTuple):
    """A request that starts with a step."""

    request_id: int
    prompt_tokens: int  # with what it had made before a retraction
    cached_tokens: int  # of them


class Refused(NamedTuple):
    """The first request that did not start, though its turn had come.

    Where no row or no prompt token of the step is left, nobody's turn is looked at: then it is the
    first of the queue.
    """

    request_id: int
    reason: str  # a `Refusal`'s value


class Retracted(NamedTuple):
    """A request that went back to the queue."""

    request_id: int
    reason: str  # a `Retraction`'s value
    lost_tokens: int  # computed, and in no cached page then
    for_request_id: int | None = None  # whom it made room for, where that is one


class StepRecord(NamedTuple):
    """One step that is done; what was decided between it and the one before is with it."""

    step: int
    done_s: float  # on the clock of Request.arrived_s
    took_s: float  # on the device
    predicted_s: float | None  # by what was learnt before it; None: nothing, or without a target
    decode_rows: int
    decode_kv_tokens: int  # in their caches
    prefill_budget: int  # prompt tokens that it might have had
    chunks: tuple[Chunk, ...]
    running: int
    waiting: int
    free_pages: int  # once it was planned
    evictable_pages: int
    evicted_pages: int
    admitted: tuple[Admitted, ...]
    refused: Refused | None
    retracted: tuple[Retracted, ...]

    def as_json(self) -> str:
        """Its line of a file, without the line's end."""
        fields = self._asdict()
        for name in ("chunks", "admitted", "retracted"):
            fields[name] = [each._asdict() for each in fields[name]]
        fields["refused"] = None if self.refused is None else self.refused._asdict()
        return json.dumps(fields)

    @classmethod
    def of_json(cls, line: str) -> "StepRecord":
        """The inverse. Raises ValueError for what is no such line."""
        try:
            fields: dict[str, Any] = json.loads(line)
            for name, kind in _NESTED.items():
                fields[name] = tuple(kind(**each) for each in fields[name])
            if fields["refused"] is not None:
                fields["refused"] = Refused(**fields["refused"])
            return cls(**fields)
        except (KeyError, TypeError) as error:
            raise ValueError(f"no step of a trace: {error}") from error


_NESTED: Final[dict[str, Any]] = {"chunks": Chunk, "admitted": Admitted, "retracted": Retracted}


class Notes:
    """What was decided until a step was planned. Owned by the engine thread."""

    __slots__ = ("admitted", "refused", "retracted")

    def __init__(self) -> None:
        self.admitted: list[Admitted] = []
        self.refused: Refused | None = None
        self.retracted: list[Retracted] = []


class StepTrace:
    """Notes of the step being planned, steps in flight, and the last that are done.

    Owned by the engine thread. Of each step, what lies at hand is kept, in two tuples; records are
    made when somebody reads. That takes 2 to 3 us, a fortieth of planning and committing a large
    step (`perf.bench_scheduler` measures it); summing the positions here would double it.
    """

    def __init__(self, holdings: Holdings, steps: int) -> None:
        """steps  how many are kept"""
        self._holdings, self._row_of = holdings, holdings.row_of
        self._pool, self._cache = holdings.pool, holdings.cache
        self._notes: Notes | None = None
        self._planned: deque[_Planned] = deque(maxlen=steps + _MOST_IN_FLIGHT)
        self._done: deque[Done] = deque(maxlen=steps)
        # Of each step, in order; the deque's own method, since a call less can be measured.
        self.done: Callable[[Done], None] = self._done.append

    @property
    def notes(self) -> Notes:
        """Of the next step to be planned."""
        if self._notes is None:
            self._notes = Notes()
        return self._notes

    def planned(
        self,
        step: int,
        waiting: int,
        positions: Int32Array,
        segments: list[tuple[int, int, int, bool]],
        budget: int,
    ) -> None:
        """A step is launched.

        positions  [decode rows] of the tokens that they draw
        segments   (row, first position, tokens, whether it is the prompt's last) each
        """
        chunks = _NO_CHUNKS
        if segments:
            ids = self._holdings.rows.request_ids
            chunks = tuple(Chunk(int(ids[row]), start, count) for row, start, count, _ in segments)
        self._planned.append((
            step, positions, budget, chunks, len(self._row_of), waiting, self._pool.free_pages,
            self._cache.evictable_pages, self._holdings.evicted_pages, self._notes,
        ))  # fmt: skip
        self._notes = None

    def last(self, count: int) -> tuple[StepRecord, ...]:
        """The last steps that are done, oldest first; each but the first that was kept."""
        planned = {each[0]: each for each in self._planned}
        kept = islice(self._done, max(0, len(self._done) - count - 1), None)
        return tuple(
            _record(planned[done[0]], done, evicted_before=planned[before[0]][8])
            for before, done in pairwise(kept)
        )


# Of a StepRecord: step, took_s, done_s, predicted_s.
Done = tuple[int, float, float, float | None]
# The rest, in another order: positions instead of numbers of tokens, notes as they are, and pages
# evicted since the engine started.
_Planned = tuple[
    int, Int32Array, int, tuple[Chunk, ...], int, int, int, int, int, Notes | None
]  # fmt: skip
_MOST_IN_FLIGHT: Final = 8  # steps planned and not done; an engine has two
_NO_CHUNKS: Final[tuple[Chunk, ...]] = ()
_NO_NOTES: Final = Notes()


def _record(planned: _Planned, done: Done, evicted_before: int) -> StepRecord:
    _, took_s, done_s, predicted_s = done
    step, positions, budget, chunks, running, waiting, free, evictable, evicted, noted = planned
    notes = noted or _NO_NOTES
    return StepRecord(
        step=step,
        done_s=done_s,
        took_s=took_s,
        predicted_s=predicted_s,
        decode_rows=len(positions),
        decode_kv_tokens=int(positions.sum()),
        prefill_budget=budget,
        chunks=chunks,
        running=running,
        waiting=waiting,
        free_pages=free,
        evictable_pages=evictable,
        evicted_pages=evicted - evicted_before,
        admitted=tuple(notes.admitted),
        refused=notes.refused,
        retracted=tuple(notes.retracted),
    )
