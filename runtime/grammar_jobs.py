"""Grammars for the HTTP loop: those that are known at once, others compiled on few threads.

Rules
- A grammar takes seconds at worst, and the loop's threads are for large bodies and texts too. So
  only few of them compile, and what waits for its turn waits without one.
- A client that leaves frees no thread: its grammar is compiled to the end, and so keeps its turn.

Knows no HTTP.
"""

import asyncio
from functools import partial
from typing import Final

from engine.grammar.spec import GrammarError, GrammarSpec
from engine.request import CompiledGrammar
from runtime.lifecycle import GrammarSource
from runtime.to_the_end import run_to_the_end

# Of all HTTP loops, but at least one each: one tries a grammar, one compiles what has passed.
THREADS: Final = 2
WAIT_S: Final = 20.0  # for a turn


class GrammarJobs:
    """Grammars under way. Owned by its HTTP loop."""

    def __init__(self, threads: int = THREADS, wait_s: float = WAIT_S) -> None:
        self._turns = asyncio.Semaphore(threads)
        self._wait_s = wait_s

    async def compile(self, source: GrammarSource, spec: GrammarSpec) -> CompiledGrammar:
        """What `source.compile` gives; raises GrammarError as it does, or where too many wait."""
        known = source.try_known(spec)
        if known is not None:
            return known
        try:
            async with asyncio.timeout(self._wait_s):
                await self._turns.acquire()
        except TimeoutError:
            message = "too many grammars are being tried; try again"
            raise GrammarError(message, transient=True) from None
        return await run_to_the_end(partial(source.compile, spec), self._turns.release)
