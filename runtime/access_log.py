"""Hypercorn's line for each request, with nothing in it that a terminal or a reader of lines obeys.

A path may have any character once it is decoded, and a header of a client's most: a line's end
would begin another line of the log, which the client wrote. Knows no format of log lines.
"""

from collections.abc import Mapping
from typing import Final

from hypercorn.logging import Logger
from hypercorn.typing import ResponseSummary, WWWScope

_MOST_CHARS: Final = 1024  # of one value; a header may have 16 KB
_NAMES: Final = "hltrsbfa"  # those that Hypercorn's access_log_format asks for


class AccessLog(Logger):
    """The access log of one HTTP loop. Owned by it."""

    def atoms(
        self, request: WWWScope, response: ResponseSummary | None, request_time: float
    ) -> Mapping[str, str]:
        """What the line is made of, each value printable."""
        atoms = super().atoms(request, response, request_time)
        return {name: _printable(atoms[name]) for name in _NAMES}


def _printable(text: str) -> str:
    """`text` with what is not printable, quotes and backslashes escaped, cut to a length."""
    cut = text[:_MOST_CHARS]
    escaped = "".join(
        each if each.isprintable() and each not in '"\\' else ascii(each)[1:-1].replace('"', '\\"')
        for each in cut
    )
    return escaped + "…" * (len(text) > _MOST_CHARS)
