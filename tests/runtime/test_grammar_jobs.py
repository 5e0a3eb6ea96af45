"""Few threads compile grammars, whoever asks and leaves; what is known needs none."""

import asyncio
import threading

import pytest

from engine.grammar.spec import GrammarError, GrammarSpec, Regex
from runtime.grammar_jobs import THREADS, GrammarJobs
from tests.fakes_executor import FakeGrammar

KNOWN = Regex("known")


class SlowGrammars:
    """Satisfies runtime.lifecycle.GrammarSource: compiling takes until the gate is open."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self._lock = threading.Lock()
        self.now = self.most = self.compiled = 0  # guarded by _lock

    def try_known(self, spec: GrammarSpec) -> FakeGrammar | None:
        return FakeGrammar(3) if spec == KNOWN else None

    def compile(self, spec: GrammarSpec) -> FakeGrammar:
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)
        assert self.gate.wait(10)
        with self._lock:
            self.now -= 1
            self.compiled += 1
        if spec == Regex("bad"):
            raise GrammarError("no")
        return FakeGrammar(5)

    def close(self) -> None:
        """Nothing was started."""


async def until_busy(source: SlowGrammars) -> None:
    while source.now < THREADS:
        await asyncio.sleep(0.001)


def test_few_threads_compile_and_what_is_known_waits_for_none() -> None:
    async def main() -> None:
        source, jobs = SlowGrammars(), GrammarJobs()
        asked = [asyncio.ensure_future(jobs.compile(source, Regex(f"{i}"))) for i in range(9)]
        await until_busy(source)
        assert await jobs.compile(source, KNOWN) == FakeGrammar(3)
        assert await asyncio.to_thread(lambda: "a thread is left") and source.compiled == 0
        source.gate.set()
        assert await asyncio.gather(*asked) == [FakeGrammar(5)] * 9
        assert source.most == THREADS
        with pytest.raises(GrammarError, match="no"):
            await jobs.compile(source, Regex("bad"))

    asyncio.run(main())


def test_clients_that_leave_free_no_thread() -> None:
    async def main() -> None:
        source, jobs = SlowGrammars(), GrammarJobs(wait_s=0.05)
        left = [asyncio.ensure_future(jobs.compile(source, Regex("bad"))) for _ in range(THREADS)]
        await until_busy(source)
        for each in left:
            each.cancel()
        with pytest.raises(GrammarError, match="too many") as refusal:
            await jobs.compile(source, Regex("next"))
        assert refusal.value.transient
        assert source.most == THREADS
        source.gate.set()
        assert await GrammarJobs().compile(source, Regex("later")) == FakeGrammar(5)
        while source.now:
            await asyncio.sleep(0.001)
        assert await jobs.compile(source, Regex("later")) == FakeGrammar(5)

    asyncio.run(main())
