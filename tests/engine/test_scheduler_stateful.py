"""Random arrivals, aborts and steps, under every policy.

Everyone ends once, with the output of a lone run, and nobody is overtaken more often than is said.
"""

from collections import defaultdict
from typing import Any, ClassVar, Literal

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from engine.cache_factory import HostMemory, build_prefix_cache
from engine.config import SCHEDULE_POLICIES
from engine.pages import PagePool
from engine.request import Finish, Request, SamplingParams, Started, StepOutput
from engine.scheduler import Scheduler
from engine.timeouts import Timeouts
from tests.fakes_executor import (
    VOCAB,
    FakeExecutor,
    FakeGrammar,
    expected_output,
    fake_engine,
)
from tests.stateful import CountedMachine, run_a_few

EOS = 5
MAX_MODEL_LEN = 48  # times `stretch`, as all lengths of prompts
QUEUE_TIMEOUT, RUNNING_TIMEOUT = 5, 9  # a request comes each second


class SchedulerMachine(CountedMachine):
    """Drives an engine over a fake executor; the model is `expected_output`."""

    stretch: ClassVar[int] = 1  # how often each token of a prompt comes
    kept_seeds: ClassVar[tuple[int, ...]] = (
        3_471_848_540,  # who had to start and who was more urgent took turns for ever
    )

    @initialize(
        page_size=st.sampled_from([1, 3, 4, 16]),
        spare_pages=st.integers(0, 40),
        max_running=st.integers(1, 6),
        budget=st.sampled_from([None, 1, 5, 16]),
        cache=st.sampled_from(["radix", "naive"]),
        overlap=st.booleans(),
        policy=st.one_of(
            st.tuples(st.sampled_from(SCHEDULE_POLICIES), st.none()),
            st.tuples(st.just("priority"), st.sampled_from([1, 2])),
        ),
        overtakings=st.sampled_from([1, 3, 256]),
        target_itl_s=st.sampled_from([None, 1e-9]),
        eviction=st.sampled_from(["lru", "lfu", "fifo"]),
        host=st.one_of(
            st.none(),
            st.builds(
                HostMemory,
                slots=st.integers(2, 60),
                write=st.sampled_from(["through", "back"]),
                copies_a_step=st.sampled_from([1, 3, 100]),
            ),
        ),
        late_copies=st.booleans(),
    )
    def build(
        self,
        page_size: int,
        spare_pages: int,
        max_running: int,
        budget: int | None,
        cache: Literal["radix", "naive"],
        overlap: bool,
        policy: tuple[str, int | None],
        overtakings: int,
        target_itl_s: float | None,
        eviction: Literal["lru", "lfu", "fifo"],
        host: HostMemory | None,
        late_copies: bool,
    ) -> None:
        page_size, self.max_model_len = page_size * self.stretch, MAX_MODEL_LEN * self.stretch
        max_pages = -(-self.max_model_len // page_size)
        pages = 1 + max_pages + spare_pages
        self.executor = FakeExecutor(
            pages, page_size, max_running, max_pages,
            host_slots=0 if host is None else host.slots, late_copies=late_copies,
        )  # fmt: skip
        self.scheduler = Scheduler(
            pool=PagePool(pages),
            cache=build_prefix_cache(cache, page_size, eviction, host),
            max_running=max_running,
            max_model_len=self.max_model_len,
            prefill_budget=None if budget is None else budget * self.stretch,
            eos_ids=(EOS,),
            vocab_size=VOCAB,
            policy=policy[0],
            preemption_threshold=policy[1],
            target_itl_s=target_itl_s,
            trace_steps=8,
            timeouts=Timeouts(queue_s=QUEUE_TIMEOUT, running_s=RUNNING_TIMEOUT),
            overtakings=overtakings,
        )
        self.engine = fake_engine(self.scheduler, self.executor, overlap=overlap)
        self.requests: dict[int, Request] = {}
        self.outputs: dict[int, list[int]] = defaultdict(list)
        self.finishes: dict[int, Finish] = {}
        self.logprobs: dict[int, list[float]] = defaultdict(list)
        self.started: set[int] = set()
        self.aborted: set[int] = set()
        self.latest_expiry = 0
        self.overtakings = overtakings
        self.overtaken: dict[int, int] = {}  # of each that waits

    @rule(
        prompt=st.lists(st.integers(0, 2), min_size=1, max_size=40),
        new=st.integers(1, 30),
        namespace=st.sampled_from(["", "tenant"]),
        stop=st.lists(st.integers(0, 96), max_size=6),
        ignore_eos=st.booleans(),
        modulus=st.sampled_from([None, None, 1, 5]),
        logprobs=st.tuples(*[st.sampled_from([None, None, 0, 2])] * 2),
        priority=st.sampled_from([0, 0, -1, 1, 4]),
        routing_key=st.sampled_from(["", "one", "other"]),
    )
    def submit(
        self,
        prompt: list[int],
        new: int,
        namespace: str,
        stop: list[int],
        ignore_eos: bool,
        modulus: int | None,
        logprobs: tuple[int | None, int | None],
        priority: int,
        routing_key: str,
    ) -> None:
        ids = np.repeat(np.array(prompt, np.int32), self.stretch)
        new = min(new, self.max_model_len - len(ids))
        params = SamplingParams(
            max_new_tokens=new, stop_token_ids=tuple(stop), ignore_eos=ignore_eos,
            logprobs=logprobs[0], prompt_logprobs=logprobs[1], priority=priority,
            routing_key=routing_key,
        )  # fmt: skip
        number = len(self.requests)
        grammar = None if modulus is None else FakeGrammar(modulus)
        request = Request(
            number, ids, params, seed=1, namespace=namespace, grammar=grammar, arrived_s=number,
        )  # fmt: skip
        self.engine.submit(request)
        self.requests[number] = request

    @precondition(lambda self: len(self.requests) > len(self.finishes))
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        alive = [number for number in self.requests if number not in self.finishes]
        number = data.draw(st.sampled_from(alive))
        self.aborted.add(number)
        self.engine.abort(number)

    @precondition(lambda self: len(self.requests) > len(self.finishes))
    @rule(seconds=st.integers(0, 4))
    def expire(self, seconds: int) -> None:
        """Ends those, and only those, that are too old: by whether they have ever started."""
        now = len(self.requests) + seconds
        self.engine.expire(now)
        waiting = {each.request.id: each for each in self.scheduler.waiting}
        running = set(self.scheduler.holdings.row_of)
        retracted = {number for number, each in waiting.items() if each.retracted}
        assert all(now - number < RUNNING_TIMEOUT for number in running | retracted)
        assert all(now - number < QUEUE_TIMEOUT for number in set(waiting) - retracted)
        self.latest_expiry = max(self.latest_expiry, now)
        self.scheduler.check_integrity()

    @rule()
    def flush(self) -> None:
        before = self.engine.stats()
        assert self.engine.flush_cache() == before.evictable_pages
        after = self.engine.stats()
        assert after.free_pages == before.free_pages + before.evictable_pages
        assert after.evictable_pages == 0
        assert self.scheduler.holdings.cache.host_counts.cached == 0
        self.scheduler.check_integrity()

    @rule(steps=st.integers(1, 8))
    def run(self, steps: int) -> None:
        for _ in range(steps):
            self._step()

    def _step(self) -> None:
        waited = {each.request.id for each in self.scheduler.waiting}
        self._take(self.engine.step())
        self.scheduler.check_integrity()
        self._check_overtakings(waited)

    def _check_overtakings(self, waited: set[int]) -> None:
        """Ids are given in the order of arrival: a higher one that has started overtook."""
        waits = {each.request.id for each in self.scheduler.waiting}
        started = waited - waits - self.aborted
        self.overtaken = {
            number: self.overtaken.get(number, 0) + sum(other > number for other in started)
            for number in waits & waited
        }
        assert max(self.overtaken.values(), default=0) <= self.overtakings

    def _take(self, output: StepOutput | None) -> None:
        if output is None:
            return
        for one in output.started:
            assert one.request.id not in self.started
            self.started.add(one.request.id)
            self._check_prompt_logprobs(one)
        for number, logprobs in output.logprobs:
            self.logprobs[number] += logprobs.chosen.tolist()
        triples = zip(output.request_ids, output.token_ids, output.finishes, strict=True)
        for number, token, finish in triples:
            assert number not in self.finishes, "something came after the end"
            if token >= 0:
                assert number in self.started
                self.outputs[int(number)].append(int(token))
            if finish:
                self.finishes[int(number)] = Finish(finish)

    def _check_prompt_logprobs(self, started: Started) -> None:
        request, told = started.request, started.prompt_logprobs
        assert 0 <= started.host_tokens <= started.cached_tokens
        if request.params.prompt_logprobs is None or len(request.prompt_ids) == 1:
            assert told is None or not len(told.chosen)
        else:
            assert told is not None
            assert told.chosen.tolist() == (-request.prompt_ids[1:]).tolist()
            assert told.top.shape[1] == request.params.prompt_logprobs
            assert started.cached_tokens == 0

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(3000):
            if not self.engine.has_work:
                break
            self._step()
        self._take(self.engine.step())  # what ended without a token
        for _ in range(100):  # that step, and more like it, may have copied pages to the host
            if self.engine.has_work:
                self._step()
        assert not self.engine.has_work
        self.scheduler.check_integrity()
        for number, request in self.requests.items():
            self._check(number, request)
        assert self.scheduler.holdings.rows.free == self.scheduler.holdings.rows.count
        assert len(self.scheduler.holdings.fence) == 0
        self.scheduler.holdings.pool.give(self.scheduler.holdings.cache.clear())
        assert self.scheduler.holdings.pool.free_pages == self.scheduler.holdings.pool.capacity

    def _check(self, number: int, request: Request) -> None:
        params = request.params
        # A grammar that is complete lets nothing follow: its request ends there.
        ignores_eos = params.ignore_eos and request.grammar is None
        eos = () if ignores_eos else (EOS,)
        stop_ids = frozenset([*eos, *params.stop_token_ids])
        grammar = request.grammar
        assert grammar is None or isinstance(grammar, FakeGrammar)
        whole = expected_output(request.prompt_ids, params.max_new_tokens, stop_ids, grammar)
        got = self.outputs[number]
        told = self.logprobs[number]
        assert told == ([] if params.logprobs is None else [-token for token in got])
        if self.finishes[number] in (Finish.ABORT, Finish.TIMEOUT):
            if self.finishes[number] == Finish.ABORT:
                assert number in self.aborted
            else:
                assert self.latest_expiry - number >= min(QUEUE_TIMEOUT, RUNNING_TIMEOUT)
            assert got == whole[: len(got)]
        else:
            assert got == whole
            expected = Finish.STOP if whole[-1] in stop_ids else Finish.LENGTH
            assert self.finishes[number] == expected


class LongPagesMachine(SchedulerMachine):
    """The same with pages of 16 to 256 tokens, and prompts of up to 640."""

    stretch = 16
    kept_seeds = ()


class PressedMachine(SchedulerMachine):
    """Long prompts that come back, where memory for one or two is all there is, above a host tier.

    So pages leave for the host and return all the time, and things happen while they do.
    """

    kept_seeds = ()

    @initialize(
        page_size=st.sampled_from([1, 3, 4, 16]),
        spare_pages=st.integers(0, 3),
        max_running=st.integers(1, 4),
        budget=st.sampled_from([None, 5, 16]),
        overlap=st.booleans(),
        policy=st.sampled_from(SCHEDULE_POLICIES),
        eviction=st.sampled_from(["lru", "lfu", "fifo"]),
        host=st.builds(
            HostMemory,
            slots=st.sampled_from([2, 3, 20, 400]),
            write=st.sampled_from(["through", "back"]),
            copies_a_step=st.sampled_from([1, 2, 5]),
        ),
        late_copies=st.booleans(),
    )
    def build(self, policy: str, **settings: Any) -> None:
        super().build(
            policy=(policy, None), cache="radix", overtakings=256, target_itl_s=None, **settings
        )

    @rule(
        visits=st.lists(st.tuples(st.integers(0, 2), st.integers(8, 40)), min_size=2, max_size=5),
        steps=st.integers(1, 6),
        then=st.sampled_from(["nothing", "abort", "flush"]),
    )
    def come_back(self, visits: list[tuple[int, int]], steps: int, then: str) -> None:
        """Prompts of few that there are, and what happens while their pages are loaded."""
        for family, length in visits:
            prompt = np.random.default_rng(family).integers(0, 3, length).tolist()
            self.submit(prompt, 3, "", [], False, None, (None, None), 0, "")
            for _ in range(steps):
                self._step()
                if loading := self._loading():
                    break
        if then == "abort":
            for number in loading:
                self.aborted.add(number)
                self.engine.abort(number)
        if then == "flush" and loading:
            self.flush()
        self.scheduler.check_integrity()

    def _loading(self) -> list[int]:
        rows = self.scheduler.holdings.rows
        row_of = self.scheduler.holdings.row_of
        return [n for n, row in row_of.items() if rows.cached[row] < rows.load_end[row]]


def test_random_operations() -> None:
    run_a_few(SchedulerMachine)


def test_random_operations_under_pressure() -> None:
    run_a_few(PressedMachine)


def test_random_operations_on_long_pages() -> None:
    run_a_few(LongPagesMachine)
