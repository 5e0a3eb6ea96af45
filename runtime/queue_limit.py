"""How much may wait for the engine: requests, and the tokens of their prompts.

Rules
- A prompt counts from `admit` until its first token has come (`begin`) or its request is over.
- Before it is tokenized it counts as the caller's guess.
- What alone is more than the limit may wait where nothing else does: the context bounds it.

Guarantees: whatever several HTTP loops admit at once, together they stay within the limits, without
a lock. Each writes what it takes into its entry of a list that all share, and only then reads the
others'. Writes to a list hold its own lock, so one comes first (library/threadsafety), and whoever
wrote later reads it. Where both see both, both may be refused, though one would have fitted.

Knows neither routes nor rings.
"""

import math
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from engine.request import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from httpd.service import Rejected

_CHARS_A_TOKEN: Final = 4  # of English prose
_RECENT: Final = 64  # prompts that the rate is taken from
_MAX_RETRY_S: Final = 60  # a client's own patience; openai-python believes up to 120


class QueueCounts:
    """What each HTTP loop has. Each entry is written by its loop alone; any loop reads them all."""

    __slots__ = ("requests", "tokens")

    def __init__(self, loops: int) -> None:
        self.requests = [0] * loops  # alive
        self.tokens = [0] * loops  # of prompts that wait


class QueueLimit:
    """What waits, and how fast it has been leaving. Owned by one HTTP loop."""

    def __init__(
        self,
        max_requests: int,
        max_tokens: int,
        counts: QueueCounts,
        loop: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        max_requests  of all loops, alive at the same time, the running ones among them
        max_tokens    of all loops' prompts that wait
        counts        shared with the other loops' limits
        loop          whose limit this is
        """
        self._counts = counts
        self._loop = loop
        self._loops = len(counts.requests)
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._clock = clock
        self._begun: deque[tuple[float, int]] = deque(maxlen=_RECENT)  # when, tokens

    def admit(self, tokens: int, requests: int = 1) -> "Place":
        """A place for requests that share one prompt of about `tokens`.

        Raises `Rejected`: 503 with the seconds after which there may be room.
        """
        self.take(tokens, requests)
        try:
            self._check(tokens, requests)
        except Rejected:
            self.take(-tokens, -requests)
            raise
        return Place(self, tokens, requests)

    def take(self, tokens: int, requests: int = 0) -> None:
        """So much more, or less, is this loop's."""
        self._counts.tokens[self._loop] += tokens
        self._counts.requests[self._loop] += requests

    @property
    def requests(self) -> int:
        """Alive, of all loops."""
        return sum(self._counts.requests)

    @property
    def tokens(self) -> int:
        """Of prompts that wait, of all loops."""
        return sum(self._counts.tokens)

    def _check(self, tokens: int, requests: int) -> None:
        """Raises `Rejected` where what was just taken is too much."""
        alive = self.requests - requests
        if alive + requests > self._max_requests:
            message = f"The server has {alive} requests; the limit is {self._max_requests}."
            raise _full(message, 1)
        waiting = self.tokens - tokens
        if waiting and waiting + tokens > self._max_tokens:
            message = (
                f"Prompts of {waiting} tokens are waiting; with this one's {tokens} they would "
                f"be over the limit of {self._max_tokens}."
            )
            raise _full(message, self._seconds_for(waiting + tokens - self._max_tokens))

    def began(self, tokens: int) -> None:
        """A prompt of so many tokens waits no more."""
        self._begun.append((self._clock(), tokens))

    def start_estimate_s(self, *, rows_are_free: bool) -> float | None:
        """Seconds until a request that came now would start, at the rate of the last minute.

        rows_are_free  nobody waits for a row

        0 where nothing is in its way; None where nothing has started of late to judge by.
        """
        if not self.tokens and rows_are_free:
            return 0.0
        now_s, recent = self._recent()
        if len(recent) < 2:
            return None
        elapsed_s = now_s - recent[0][0]
        if not self.tokens:
            return elapsed_s / (len(recent) - 1) / self._loops  # when the next row is given
        tokens = sum(each for _, each in recent[1:]) * self._loops
        return self.tokens * elapsed_s / tokens if tokens else None

    def _seconds_for(self, tokens: int) -> int:
        """Whole seconds in which so many leave, at the last minute's rate; 1 where unknown.

        Other loops' prompts are taken to leave as fast as this one's.
        """
        now_s, recent = self._recent()
        if len(recent) < 2:
            return 1
        elapsed_s = now_s - recent[0][0]
        left = sum(each for _, each in recent[1:])
        if left == 0:
            return 1
        return min(max(math.ceil(tokens * elapsed_s / (left * self._loops)), 1), _MAX_RETRY_S)

    def _recent(self) -> tuple[float, list[tuple[float, int]]]:
        """Now, and what has begun in the last minute: an idle hour says nothing of the rate."""
        now_s = self._clock()
        return now_s, [each for each in self._begun if each[0] >= now_s - _MAX_RETRY_S]


class Place:
    """What one prompt takes of a `QueueLimit`. Owned by its HTTP loop."""

    __slots__ = ("_limit", "_requests", "_tokens", "_waits")

    def __init__(self, limit: QueueLimit, tokens: int, requests: int) -> None:
        self._limit, self._tokens, self._requests = limit, tokens, requests
        self._waits = True

    def settle(self, tokens: int) -> None:
        """The prompt was tokenized: it has so many. Does nothing once it has begun."""
        if self._waits:
            self._limit.take(tokens - self._tokens)
            self._tokens = tokens

    def begin(self) -> None:
        """Its first token has come; called with each one after it, too."""
        if self._waits:
            self._waits = False
            self._limit.take(-self._tokens)
            self._limit.began(self._tokens)

    def end(self) -> None:
        """One of its requests is over, whether or not it began. Called once for each."""
        assert self._requests > 0
        self._requests -= 1
        is_last = self._requests == 0
        self._limit.take(-self._tokens if is_last and self._waits else 0, -1)
        self._waits = self._waits and not is_last


def guessed_tokens(prompt: Prompt) -> int:
    """About as many as the prompt has, before it is tokenized; never none."""
    match prompt:
        case TokenPrompt(token_ids):
            return len(token_ids)
        case TextPrompt(text):
            return 1 + len(text) // _CHARS_A_TOKEN
        case ChatPrompt(messages):
            return 1 + sum(len(str(each.get("content"))) for each in messages) // _CHARS_A_TOKEN


def _full(message: str, retry_after_s: int) -> Rejected:
    return Rejected(503, message, code="queue_full", retry_after_s=retry_after_s)
