"""How much longer than under fcfs a request waits under another policy, whoever comes meanwhile."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import SCHEDULE_POLICIES
from tests.engine.test_policies import Rig, prompt_of

NEW = 2  # tokens of every answer: so each takes the row for as many steps
SERVICE = NEW + 2  # steps from the start of one to that of the next, with one planned ahead


@dataclass(frozen=True)
class Arrival:
    """A request of a client who is loved, or not."""

    pause: int  # steps since the one before
    beginning: int  # of its prompt, which others have, too
    own: int  # tokens after it
    priority: int
    key: str


ARRIVALS = st.lists(
    st.builds(
        Arrival,
        pause=st.sampled_from([0, 0, 1, 3, 8]),
        beginning=st.integers(0, 2),
        own=st.integers(1, 12),
        priority=st.integers(-2, 3),
        key=st.sampled_from(["", "loved"]),
    ),
    min_size=2,
    max_size=14,
)


def waits_of(policy: str, arrivals: list[Arrival], overtakings: int) -> list[int]:
    """Steps that each waits for its first token, with one row for all."""
    rig = Rig(policy, overtakings=overtakings)
    begins = np.cumsum([each.pause for each in arrivals]).tolist()
    submitted, waits, now = 0, [0] * len(arrivals), 0
    while len(rig.ends) < len(arrivals):
        while submitted < len(arrivals) and begins[submitted] <= now:
            each = arrivals[submitted]
            prompt = np.concatenate([prompt_of(8, each.beginning), prompt_of(each.own, submitted)])
            rig.submit(submitted, prompt, NEW, priority=each.priority, key=each.key)
            submitted += 1
        started = len(rig.starts)
        rig.step()
        now += 1
        for number in rig.starts[started:]:
            waits[number] = now - begins[number]
    return waits


@pytest.mark.parametrize("policy", SCHEDULE_POLICIES)
@settings(max_examples=10, deadline=None)
@given(arrivals=ARRIVALS, overtakings=st.integers(0, 4))
def test_nobody_waits_longer_than_behind_so_many_more_under_fcfs(
    policy: str, arrivals: list[Arrival], overtakings: int
) -> None:
    fcfs = waits_of("fcfs", arrivals, overtakings)
    waits = waits_of(policy, arrivals, overtakings)
    assert sorted(waits)[0] > 0
    for wait, at_most in zip(waits, fcfs, strict=True):
        assert wait <= at_most + overtakings * SERVICE
