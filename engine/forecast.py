"""How much of their allowance running requests are going to use."""

from typing import Final

START: Final = 0.7  # of max_new_tokens, before anything was seen
FLOOR: Final = 0.1
WEIGHT: Final = 0.05  # of one finished request in the moving average
RETRACTION: Final = 0.3  # what one retraction adds: the forecast was too low


class OutputForecast:
    """A moving average of output length over allowance. Owned by the engine thread.

    Admission reserves this share of everyone's remaining allowance, so that memory is used well
    where most requests end early, and retractions stay rare where they do not.
    """

    def __init__(self) -> None:
        self.share = START

    def finished(self, output_tokens: int, allowance_tokens: int) -> None:
        self.share += WEIGHT * (output_tokens / allowance_tokens - self.share)
        self.share = max(self.share, FLOOR)

    def retracted(self) -> None:
        self.share = min(1.0, self.share + RETRACTION)
