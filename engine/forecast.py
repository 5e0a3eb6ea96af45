"""How much of their allowance running requests are going to use."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

# Of one request's allowance no more than this is looked at: a chat without max_tokens may use the
# whole context and hardly ever does. Retraction is there for those that do.
FORESEEN_TOKENS: Final = 2048

START: Final = 0.7  # the share, before anything was seen
START_TOKENS: Final = 4 * FORESEEN_TOKENS  # how much that opinion weighs
FLOOR: Final = 0.1
DECAY: Final = 0.95  # of what was seen before, with each request that finishes
RETRACTION: Final = 0.3  # what one retraction adds to the share: it was too low


class OutputForecast:
    """Tokens made over tokens allowed, of the last requests. Owned by the engine thread.

    Admission reserves this share of everyone's remaining allowance, so that memory is used well
    where most requests end early, and retractions stay rare where they do not. Tokens are summed
    before they are divided: many short answers do not hide a long one, which is what takes memory.
    """

    def __init__(self, share: float = START) -> None:
        self._made = share * START_TOKENS
        self._allowed = float(START_TOKENS)

    @property
    def share(self) -> float:
        return max(FLOOR, self._made / self._allowed)

    def finished(self, output_tokens: int, allowance_tokens: int) -> None:
        self._made = DECAY * self._made + min(output_tokens, FORESEEN_TOKENS)
        self._allowed = DECAY * self._allowed + min(allowance_tokens, FORESEEN_TOKENS)

    def retracted(self) -> None:
        self._made = min(self._allowed, self._made + RETRACTION * self._allowed)


def peak_tokens(to_come: NDArray[np.float64], held: NDArray[np.integer]) -> float:
    """The most tokens that rows ever need beyond what they hold, if all make theirs side by side.

    to_come  [n] what each is going to make
    held     [n] what comes back when it has

    Less than all that is to come: when the longest make their last tokens, the short have ended.
    """
    order = np.argsort(to_come)
    came_back = np.cumsum(held[order]) - held[order]  # when this one is about to end
    running = np.arange(len(order), 0, -1)
    return float((running * to_come[order] - came_back).max())
