"""Log lines: one form for people, or a JSON object each for programs; to standard error.

Each line names the thread that wrote it, and the request (its x-request-id) where a thread of the
HTTP side works for one. The engine's lines name a request by its number, which GET
/debug/requests/{id} tells, too.
"""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Final

from httpd.traces import current_trace

FORMATS: Final = ("human", "json")
_HUMAN: Final = "%(asctime)s %(levelname)-7s {}%(threadName)s %(name)s: %(message)s"


class Context(logging.Filter):
    """Adds the request and the rank to a line. Safe from any thread."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank

    def filter(self, record: logging.LogRecord) -> bool:
        trace = current_trace()
        record.request_id = None if trace is None else trace.request_id
        record.rank = self._rank
        return True


class HumanLines(logging.Formatter):
    """As people read them; the request behind the message. Safe from any thread."""

    def __init__(self, rank: int = 0) -> None:
        """rank  of this process; all but the first tell theirs"""
        process = f"rank {rank} " if rank else ""
        super().__init__(_HUMAN.format(process), "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = super().formatMessage(record)
        request_id = getattr(record, "request_id", None)
        return line if request_id is None else f"{line} [{request_id}]"


class JsonLines(logging.Formatter):
    """One object a line, on one line whatever it says. Safe from any thread."""

    def format(self, record: logging.LogRecord) -> str:
        told = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname.lower(),
            "thread": record.threadName,
            "logger": record.name,
            "message": record.getMessage(),
            "rank": getattr(record, "rank", 0),
            "request_id": getattr(record, "request_id", None),
        }
        if record.exc_info:
            told["stack"] = self.formatException(record.exc_info)
        return json.dumps(told)


def set_up_logging(form: str = "human", rank: int = 0) -> None:
    """
    form  one of FORMATS
    rank  of this process, of those that serve the model together
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(Context(rank))
    handler.setFormatter(JsonLines() if form == "json" else HumanLines(rank))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.captureWarnings(True)  # Python's own, which libraries warn by
    logging.getLogger("hypercorn.error").setLevel(logging.WARNING)  # it greets, and so do we


def adopt_libraries() -> None:
    """Has libraries write by our handler what they write by handlers of their own.

    Call it once they are imported: torch and transformers make theirs then. What their C++ writes
    to standard error stays as it is.
    """
    for logger in list(logging.root.manager.loggerDict.values()):
        if isinstance(logger, logging.Logger):
            for handler in list(logger.handlers):
                if isinstance(handler, logging.StreamHandler) and handler.stream in (
                    sys.stderr,
                    sys.__stderr__,
                ):
                    logger.removeHandler(handler)
                    logger.propagate = True
