"""How many prompt tokens a step may carry so that it takes no longer than it should.

Learns from what steps took. Knows neither devices nor clocks: durations are given to it.

A step takes what its decode rows take alone, and something for each prompt token beside them. Each
is averaged over the steps of late. Where steps without prompts are rare the first is out of date,
and the second makes up for it: a step that took too long makes tokens dear, whatever the cause, and
the next one carries fewer.
"""

from typing import Final

DECAY: Final = 0.8  # of what was seen before, with each step
AIM: Final = 0.9  # of the target: a step that takes a little longer than learnt still keeps it
FLOOR_TOKENS: Final = 64  # prompts go on whatever it takes: a page of the default size


class StepCost:
    """Seconds of decode rows and of prompt tokens. Owned by the engine thread."""

    def __init__(self) -> None:
        self._decode_s: dict[int, float] = {}  # by the number of rows, in powers of two
        self._prefill_s = 0.0
        self._prefill_tokens = 0.0

    def observe(self, decode_rows: int, prefill_tokens: int, took_s: float) -> None:
        """A step has taken so long."""
        if prefill_tokens:
            beyond_s = max(0.0, took_s - self._decoding_s(decode_rows))
            self._prefill_s = DECAY * self._prefill_s + beyond_s
            self._prefill_tokens = DECAY * self._prefill_tokens + prefill_tokens
        elif decode_rows:
            size = decode_rows.bit_length()
            before_s = self._decode_s.get(size, took_s)
            self._decode_s[size] = DECAY * before_s + (1 - DECAY) * took_s

    def tokens_within(self, target_s: float, decode_rows: int) -> int | None:
        """Prompt tokens beside so many decode rows; None until anything is known of them."""
        if not self._prefill_s:
            return None
        left_s = AIM * target_s - self._decoding_s(decode_rows)
        return max(FLOOR_TOKENS, int(left_s * self._prefill_tokens / self._prefill_s))

    def predicted_s(self, decode_rows: int, prefill_tokens: int) -> float | None:
        """Of such a step; None until anything is known of its parts."""
        if (decode_rows and not self._decode_s) or (prefill_tokens and not self._prefill_s):
            return None
        prefill_s = 0.0
        if prefill_tokens:
            prefill_s = prefill_tokens * self._prefill_s / self._prefill_tokens
        return (self._decoding_s(decode_rows) if decode_rows else 0.0) + prefill_s

    def _decoding_s(self, rows: int) -> float:
        """Of as many rows; else of the nearest fewer, else of the fewest that are known."""
        known, size_of_rows = self._decode_s, rows.bit_length()
        if size_of_rows in known:
            return known[size_of_rows]
        if not known:
            return 0.0
        fewer = [size for size in known if size <= size_of_rows]
        return known[max(fewer) if fewer else min(known)]
