"""The two forms of log lines."""

import io
import json
import logging
import sys

import pytest

from httpd.traces import Traces
from runtime.logs import Context, HumanLines, JsonLines, adopt_libraries


def written(formatter: logging.Formatter, rank: int = 0) -> tuple[logging.Logger, io.StringIO]:
    """A logger of its own, and what it writes."""
    said = io.StringIO()
    handler = logging.StreamHandler(said)
    handler.setFormatter(formatter)
    handler.addFilter(Context(rank))
    logger = logging.Logger("some.part")
    logger.addHandler(handler)
    return logger, said


def test_people_see_the_request_behind_the_message() -> None:
    logger, said = written(HumanLines())
    with Traces().entry("req_7", "/v1/completions"):
        logger.warning("it is %s", "late")
    logger.info("alone")
    first, second = said.getvalue().splitlines()
    assert first.endswith("WARNING MainThread some.part: it is late [req_7]")
    assert second.endswith("INFO    MainThread some.part: alone")


def test_ranks_are_told_where_there_are_several() -> None:
    logger, said = written(HumanLines(1), rank=1)
    logger.info("hello")
    assert "INFO    rank 1 MainThread some.part: hello" in said.getvalue()


def test_programs_get_an_object_a_line() -> None:
    logger, said = written(JsonLines(), rank=3)
    with Traces().entry("req_7", "/v1/completions"):
        try:
            raise ValueError("two\nlines")
        except ValueError:
            logger.exception("it %s", "failed\n")
    (line,) = said.getvalue().splitlines()
    told = json.loads(line)
    assert told.pop("at").endswith("+00:00")
    assert "ValueError: two\nlines" in told.pop("stack")
    assert told == {
        "level": "error", "thread": "MainThread", "logger": "some.part", "message": "it failed\n",
        "rank": 3, "request_id": "req_7",
    }  # fmt: skip


@pytest.mark.parametrize("formatter", [HumanLines(1), JsonLines()])
def test_lines_without_the_filter_are_written_too(formatter: logging.Formatter) -> None:
    """As pytest's own handler gets them."""
    record = logging.LogRecord("x", logging.INFO, "f.py", 1, "hi", (), None)
    record.rank = 0
    assert "hi" in formatter.format(record)


def test_libraries_write_by_our_handler() -> None:
    """As torch does: a handler of its own, and nothing to the root."""
    library, file = logging.getLogger("a.library"), logging.getLogger("a.file")
    kept = logging.StreamHandler(io.StringIO())
    library.addHandler(logging.StreamHandler(sys.stderr))
    file.addHandler(kept)
    library.propagate = file.propagate = False
    adopt_libraries()
    assert library.handlers == [] and library.propagate
    assert file.handlers == [kept] and not file.propagate, "that is no terminal"
    file.removeHandler(kept)
