"""What steps have done and taken since the engine was built, as plain numbers."""

from bisect import bisect_left
from dataclasses import dataclass
from typing import Final

# Upper ends of buckets, seconds: from a small model's decode step on a GPU to a prefill on a CPU.
STEP_BOUNDS_S: Final = (
    0.001, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5,
    1.0, 2.5,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class StepCounts:
    """A snapshot. Seconds on the device; host seconds are in EngineStats."""

    by_duration: tuple[int, ...] = (0,) * (len(STEP_BOUNDS_S) + 1)  # steps, by STEP_BOUNDS_S
    busy_s: float = 0.0  # with a step under way
    prefill_tokens: int = 0  # computed
    sampled_tokens: int = 0  # of which some are dropped: their request had ended


class StepCounters:
    """Adds up what steps did. Owned by the engine thread."""

    def __init__(self) -> None:
        self._by_duration = [0] * (len(STEP_BOUNDS_S) + 1)
        self._busy_s = 0.0
        self._prefill_tokens = 0
        self._sampled_tokens = 0

    def observe(self, took_s: float, prefill_tokens: int, sampled_tokens: int) -> None:
        """One step is done."""
        self._by_duration[bisect_left(STEP_BOUNDS_S, took_s)] += 1
        self._busy_s += took_s
        self._prefill_tokens += prefill_tokens
        self._sampled_tokens += sampled_tokens

    def counts(self) -> StepCounts:
        return StepCounts(
            tuple(self._by_duration), self._busy_s, self._prefill_tokens, self._sampled_tokens
        )
