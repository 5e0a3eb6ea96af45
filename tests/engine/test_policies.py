"""Orders of the waiting queue, the bound on overtaking, and who is sent back under pressure."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cache_factory import build_prefix_cache
from engine.config import SCHEDULE_POLICIES, EngineConfig
from engine.forecast import OutputForecast
from engine.pages import PagePool
from engine.policies import MATCHES, Policy, build_policy
from engine.request import Int32Array, Request, SamplingParams
from engine.scheduler import Scheduler
from engine.waiting import AGEING, CANDIDATES, MOST_PRIORITY, Waiting, WaitingQueue
from tests.fakes_executor import VOCAB, FakeExecutor, expected_output, fake_engine

PAGE = 4


class Rig:
    """A scheduler of one policy over a fake executor."""

    def __init__(
        self,
        policy: str,
        *,
        max_running: int = 1,
        pages: int = 65,
        preemption_threshold: int | None = None,
        overtakings: int = 256,
        prefill_budget: int | None = None,
    ) -> None:
        self.scheduler = Scheduler(
            pool=PagePool(pages),
            cache=build_prefix_cache("radix", PAGE),
            max_running=max_running,
            max_model_len=64,
            prefill_budget=prefill_budget,
            eos_ids=(),
            vocab_size=VOCAB,
            policy=policy,
            preemption_threshold=preemption_threshold,
            overtakings=overtakings,
        )
        executor = FakeExecutor(pages, PAGE, max_running, 16)
        self.engine = fake_engine(self.scheduler, executor, overlap=True)
        self.requests: dict[int, Request] = {}
        self.tokens: dict[int, list[int]] = {}
        self.starts: list[int] = []
        self.ends: list[int] = []

    def submit(
        self, number: int, prompt: Int32Array, new: int = 3, *, priority: int = 0, key: str = ""
    ) -> None:
        params = SamplingParams(max_new_tokens=new, priority=priority, routing_key=key)
        self.requests[number] = Request(number, prompt, params, seed=0)
        self.tokens[number] = []
        self.engine.submit(self.requests[number])

    def step(self) -> None:
        output = self.engine.step()
        self.scheduler.check_integrity()
        if output is None:
            return
        self.starts += [started.request.id for started in output.started]
        for number, token in zip(output.request_ids, output.token_ids, strict=True):
            self.tokens[int(number)].append(int(token))
        self.ends += output.request_ids[output.finishes != 0].tolist()

    def drain(self) -> None:
        while self.engine.has_work:
            self.step()
        for number, request in self.requests.items():
            wanted = expected_output(request.prompt_ids, request.params.max_new_tokens)
            assert self.tokens[number] == wanted


def prompt_of(length: int, seed: int) -> Int32Array:
    return np.random.default_rng(seed).integers(0, 90, length).astype(np.int32)


def starting_with(prefix: Int32Array, length: int, seed: int) -> Int32Array:
    return np.concatenate([prefix, prompt_of(length, seed)])


def test_first_come_first_served_looks_at_nothing_else() -> None:
    rig = Rig("fcfs")
    for number, (new, priority) in enumerate([(2, 0), (9, 5), (4, 9)]):
        rig.submit(number, prompt_of(9, number), new, priority=priority)
    rig.drain()
    assert rig.starts == [0, 1, 2]


def test_lpm_starts_first_what_is_cached_for_the_most_part() -> None:
    rig = Rig("lpm")
    common = prompt_of(16, 100)
    rig.submit(0, starting_with(common, 4, 0))
    rig.drain()
    rig.submit(1, prompt_of(12, 1))
    rig.submit(2, starting_with(common[:8], 8, 2))
    rig.submit(3, starting_with(common, 6, 3))
    rig.submit(4, prompt_of(12, 4))
    rig.drain()
    assert rig.starts == [0, 3, 2, 1, 4]


def test_dfs_weight_goes_down_the_prefix_most_wait_for_and_stays_there() -> None:
    rig = Rig("dfs-weight")
    heavy, light = prompt_of(8, 100), prompt_of(16, 101)
    fork = starting_with(heavy, 8, 102)
    for number, prompt in enumerate([light, heavy, fork]):
        rig.submit(number, starting_with(prompt, 5, number))
        rig.drain()
    # Who leaves the tree early goes after those further down, and last who is not in it.
    for number, prompt in enumerate([light, heavy, light, fork, heavy, fork], 3):
        rig.submit(number, starting_with(prompt, 5, 50 + number))
    rig.submit(2000, prompt_of(30, 2000))
    for _ in range(2):  # the first time, only MATCHES are looked up
        order = [waiting.request.id for waiting in rig.scheduler.waiting.candidates()]
    assert order == [6, 8, 4, 7, 3, 5, 2000]
    rig.drain()


def test_short_first_starts_the_short_and_overtakes_a_long_one_by_less_than_its_length() -> None:
    rig = Rig("short-first")
    lengths = [5, 30, 8, 8, 8, 8, 8, 8]
    for number, length in enumerate(lengths):
        rig.submit(number, prompt_of(length, number), 1)
    rig.drain()
    assert rig.starts == [0, 2, 3, 1, 4, 5, 6, 7]  # another 8, which count twice, would be too many


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30))
def test_short_first_overtakes_nobody_by_as_many_tokens_as_it_has(lengths: list[int]) -> None:
    queue = WaitingQueue(build_policy("short-first", Rig("fcfs").scheduler.holdings))
    for number, length in enumerate(lengths):
        queue.add(Request(number, prompt_of(length, number), SamplingParams(2), seed=0))
    order = [waiting.request.id for waiting in queue]
    for place, number in enumerate(order):
        overtook = [lengths[other] for other in order[:place] if other > number]
        assert sum(overtook) < lengths[number]


def test_short_first_counts_what_is_not_cached() -> None:
    rig = Rig("short-first")
    long = prompt_of(40, 100)
    rig.submit(0, long, 1)
    rig.drain()
    for number in range(1, 4):
        rig.submit(number, prompt_of(12, number), 1)
    rig.submit(4, starting_with(long, 2, 4), 1)
    rig.drain()
    assert rig.starts == [0, 1, 2, 4, 3]


def test_a_short_prompt_goes_before_the_rest_of_a_long_one() -> None:
    for policy, starts in (("short-first", [1, 0]), ("lof", [0, 1])):
        rig = Rig(policy, max_running=2, prefill_budget=8)
        rig.submit(0, prompt_of(40, 0), 9)
        rig.step()
        rig.submit(1, prompt_of(6, 1), 9)
        rig.drain()
        assert rig.starts == starts


def test_lof_starts_first_what_may_take_longest() -> None:
    rig = Rig("lof")
    for number, new in enumerate([4, 9, 2, 9]):
        rig.submit(number, prompt_of(5, number), new)
    rig.drain()
    assert rig.starts == [1, 3, 0, 2]


def test_a_random_order_is_the_seeds_alone() -> None:
    def order(seed: int) -> list[int]:
        rig = Rig("fcfs")
        queue = WaitingQueue(build_policy("random", rig.scheduler.holdings, seed))
        for number in range(20):
            queue.add(Request(number, prompt_of(3, 0), SamplingParams(2), seed=0))
        return [waiting.request.id for waiting in queue]

    assert order(1) == order(1) != order(2)
    assert sorted(order(1)) == list(range(20)) != order(1)


def test_routing_key_starts_first_those_of_the_key_that_runs_most() -> None:
    rig = Rig("routing-key", max_running=4)
    for number, key in enumerate(["b", "a", "b", ""]):
        rig.submit(number, prompt_of(5, number), 5 if number == 3 else 30, key=key)
    rig.step()
    for number, key in enumerate(["", "c", "a", "b"], 4):
        rig.submit(number, prompt_of(5, number), 2, key=key)
    rig.drain()
    assert rig.starts[4:] == [7, 6, 4, 5]


def test_priority_starts_the_higher_first_and_equal_ones_by_age() -> None:
    rig = Rig("priority")
    for number, priority in enumerate([0, 1, -1, 1, 2]):
        rig.submit(number, prompt_of(5, number), priority=priority)
    rig.drain()
    assert rig.starts == [4, 1, 3, 0, 2]


def test_a_priority_beyond_the_most_is_the_most() -> None:
    rig = Rig("priority")
    for number, priority in enumerate([0, MOST_PRIORITY, MOST_PRIORITY + 1, 2**31 - 1]):
        rig.submit(number, prompt_of(5, number), priority=priority)
    rig.drain()
    assert rig.starts == [1, 2, 3, 0]


def test_a_level_of_priority_is_worth_so_many_arrivals() -> None:
    rig = Rig("priority")
    for number in range(AGEING + 2):
        rig.submit(number, prompt_of(5, number), 1)
    rig.submit(1000, prompt_of(5, 1000), 1, priority=1)
    rig.drain()
    assert rig.starts.index(1000) == 3  # those that came AGEING or more before it


@pytest.mark.parametrize("policy", SCHEDULE_POLICIES)
def test_nobody_is_overtaken_more_often_than_is_said(policy: str) -> None:
    rig = Rig(policy, overtakings=5)
    loved = prompt_of(8, 100)
    rig.submit(0, starting_with(loved, 3, 0), 9, key="loved")
    rig.step()
    rig.submit(1, prompt_of(9, 1), 1, priority=-9)  # nothing speaks for it under any policy
    for number in range(2, 30):
        prompt = starting_with(loved, 3, number)
        rig.submit(number, prompt, 2 + number % 3, priority=number % 5, key="loved")
    rig.drain()
    assert rig.starts.index(1) <= 1 + 5


def test_whoever_is_due_waits_for_no_sibling() -> None:
    rig = Rig("fcfs", max_running=8, overtakings=0)
    for number in range(3):
        rig.submit(number, prompt_of(17, 0))
    rig.step()
    assert rig.engine.stats().running == 3
    rig.drain()


def test_only_the_first_of_a_long_queue_are_matched_a_few_for_each_step() -> None:
    rig = Rig("lpm")
    rig.submit(0, prompt_of(16, 100))
    rig.drain()
    for number in range(1, CANDIDATES + 1):
        rig.submit(number, prompt_of(9, number), 1)
    rig.submit(1000, starting_with(prompt_of(16, 100), 4, 1000), 1)
    rig.drain()
    # It is one of the first once another has started, and then looked up after all before it.
    assert 2 <= rig.starts.index(1000) <= 2 + CANDIDATES // MATCHES
    assert len(rig.starts) == CANDIDATES + 2


def test_a_waiting_request_takes_the_row_of_one_much_less_urgent() -> None:
    rig = Rig("priority", max_running=2, preemption_threshold=2)
    rig.submit(0, prompt_of(5, 0), 20)
    rig.submit(1, prompt_of(5, 1), 20, priority=1)
    rig.step()
    rig.submit(2, prompt_of(5, 2), 3, priority=3)
    for _ in range(6):
        rig.step()
    assert 2 in rig.starts
    assert rig.scheduler.retractions == 1
    rig.drain()
    assert rig.ends[0] == 2


def test_a_row_is_taken_from_the_only_one_that_runs_too() -> None:
    rig = Rig("priority", preemption_threshold=2)
    rig.submit(0, prompt_of(5, 0), 20)
    rig.step()
    rig.submit(1, prompt_of(5, 1), 20, priority=5)
    rig.submit(2, prompt_of(5, 2), 3, priority=6)  # not by so much more than the other
    rig.drain()
    assert rig.starts == [0, 2, 1] and rig.ends == [2, 1, 0]
    assert rig.scheduler.retractions == 1


def test_who_has_to_start_and_who_is_more_urgent_do_not_take_turns() -> None:
    rig = Rig("priority", preemption_threshold=1, overtakings=1)
    rig.submit(0, prompt_of(5, 0), 5, priority=5)
    rig.step()
    for number, priority in enumerate([-1, 0, 4], 1):
        rig.submit(number, prompt_of(5, number), 9, priority=priority)
    for _ in range(100):
        rig.step()
    assert not rig.engine.has_work
    assert rig.ends == [0, 3, 1, 2] and rig.scheduler.retractions == 0
    rig.drain()


@pytest.mark.parametrize(("threshold", "priority"), [(None, 9), (3, 2)])
def test_a_request_that_is_not_urgent_enough_waits(threshold: int | None, priority: int) -> None:
    rig = Rig("priority", max_running=2, preemption_threshold=threshold)
    for number in range(2):
        rig.submit(number, prompt_of(5, number), 9)
    rig.step()
    rig.submit(2, prompt_of(5, 2), 3, priority=priority)
    rig.drain()
    assert rig.scheduler.retractions == 0
    assert rig.starts == [0, 1, 2]


def test_no_row_is_taken_where_that_would_not_make_room() -> None:
    rig = Rig("priority", max_running=3, pages=17, preemption_threshold=1)
    rig.submit(0, prompt_of(32, 0), 12, priority=9)
    rig.submit(1, prompt_of(5, 1), 12)
    rig.step()
    rig.submit(2, prompt_of(50, 2), 3, priority=5)
    for _ in range(4):
        rig.step()
    assert rig.scheduler.retractions == 0
    rig.drain()


def test_pressure_sends_back_the_lowest_priority_and_never_the_lowest_rank() -> None:
    rig = Rig("priority", max_running=4, pages=17)
    for number, priority in enumerate([0, 2, 1, 2]):
        rig.submit(number, prompt_of(9, number), 40, priority=priority)
    rig.scheduler.admission.forecast = OutputForecast(share=0.0)  # admit without much thought
    rig.drain()
    assert rig.scheduler.retractions > 0
    assert rig.ends == [1, 3, 2, 0]


def test_pressure_sends_back_who_loses_least() -> None:
    rig = Rig("fcfs", max_running=3, pages=33)
    lengths = [20, 4, 20]
    for number, length in enumerate(lengths):
        rig.submit(number, prompt_of(length, number), 30)
        rig.step()
    for _ in range(4):
        rig.step()
    rows = rig.scheduler.holdings.rows
    row_of = rig.scheduler.holdings.row_of
    lost = {n: int(rows.cached[r] - rows.shared[r] * PAGE) for n, r in row_of.items() if n}
    least = min(lost, key=lambda number: (lost[number], -number))
    assert rig.scheduler.pressure.retract_one()
    assert [waiting.request.id for waiting in rig.scheduler.waiting] == [least]
    rig.drain()


def test_whoever_was_retracted_is_at_the_front() -> None:
    rig = Rig("fcfs")
    for policy in set(SCHEDULE_POLICIES) - {"priority"}:
        queue = WaitingQueue(build_policy(policy, rig.scheduler.holdings))
        for number in range(2, 9):
            queue.add(Request(number, prompt_of(3, 0), SamplingParams(20), seed=0))
        back = Request(1, prompt_of(3, 0), SamplingParams(2), seed=0)
        queue.put_back(Waiting(back, prompt_of(4, 0), order=0, retracted=True))
        assert next(queue.candidates()).request.id == 1


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"schedule_policy": "lifo"}, "must be one of fcfs, short-first"),
        ({"preemption_threshold": 1}, "only a schedule_policy of priority"),
        ({"schedule_policy": "priority", "preemption_threshold": 0}, "between 1 and 1000"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        EngineConfig(model=None, **settings)  # type: ignore[arg-type]


def test_every_policy_is_built_by_its_name_and_no_other() -> None:
    holdings = Rig("fcfs").scheduler.holdings
    with pytest.raises(AssertionError, match="no policy 'fifo'"):
        build_policy("fifo", holdings)
    built = {name: build_policy(name, holdings) for name in SCHEDULE_POLICIES}
    in_turn = {name for name, policy in built.items() if type(policy) is Policy}
    assert in_turn == {"fcfs", "priority"}
