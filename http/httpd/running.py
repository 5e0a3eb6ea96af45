"""The responses under way, by the id that their clients were told: for an admin to end one.

Knows neither what ends a response nor how: its endpoint says.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Running:
    """The responses that are being made. Owned by its HTTP loop."""

    def __init__(self) -> None:
        self._enders: dict[str, Callable[[], None]] = {}

    def __len__(self) -> int:
        return len(self._enders)

    @contextmanager
    def entry(self, response_id: str, end: Callable[[], None]) -> Iterator[None]:
        """Lists a response for as long as it is made.

        end  lets its generations end as at the server's own wish, so that its client is told;
             does nothing once they have
        """
        self._enders[response_id] = end
        try:
            yield
        finally:
            del self._enders[response_id]

    def try_end(self, response_id: str) -> bool:
        """Ends a response; False where there is none of this id."""
        end = self._enders.get(response_id)
        if end is None:
            return False
        end()
        return True
