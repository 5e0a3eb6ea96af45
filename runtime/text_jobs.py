"""Encoding and decoding for requests that generate nothing, on threads beside the HTTP loop's.

Knows neither the tokenizer nor HTTP beyond `Rejected`. Jobs that generate go over the tokenizer
threads' rings instead, whose backpressure is the engine's queue.
"""

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Final, ParamSpec, TypeVar

from engine.errors import PromptError
from httpd.service import Rejected
from runtime.to_the_end import run_to_the_end

log = logging.getLogger(__name__)

# At once, of all HTTP loops, waiting ones included; each may hold a text of megabytes.
MAX_JOBS: Final = 64

Given = ParamSpec("Given")
Result = TypeVar("Result")


class TextJobs:
    """The jobs under way. Owned by its HTTP loop."""

    def __init__(self, max_jobs: int = MAX_JOBS) -> None:
        self._max_jobs = max_jobs
        self._running = 0

    async def run(
        self, job: Callable[Given, Result], *args: Given.args, **kwargs: Given.kwargs
    ) -> Result:
        """What `job` gives, run on another thread.

        Raises PromptError as the job does, and `Rejected`: 503 where too many are under way, 500
        for whatever else it raises.
        """
        if self._running >= self._max_jobs:
            message = f"There are {self._max_jobs} texts to encode or decode, which is the limit."
            raise Rejected(503, message, code="busy", retry_after_s=1)
        self._running += 1
        try:
            return await run_to_the_end(partial(job, *args, **kwargs), self._end)
        except (PromptError, asyncio.CancelledError, SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:  # a panic in Rust is no Exception, and this text's alone
            log.exception("a text cannot be encoded or decoded")
            message = "The server failed to encode or decode this text."
            raise Rejected(500, message, code="internal_error") from error

    def _end(self) -> None:
        self._running -= 1
