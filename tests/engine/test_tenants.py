"""What one tenant can learn of another's prompts: CVE-2025-46570, CVE-2025-25183.

A prompt that is known shows in how soon its answer begins. Time is counted in steps here and in
prompt tokens computed, which is all that differs between a prompt that is cached and one that is
not; wall time would tell of the machine's other work.
"""

import pytest

from engine.request import Int32Array, Request, SamplingParams
from tests.engine.test_scheduler import Rig, prompt_of

BUDGET = 4  # prompt tokens a step: a prompt that is not cached takes five
PROMPT, OTHER = prompt_of(18), prompt_of(18, seed=1)


class Colliding(str):
    """A namespace whose hash is that of every other, as an attacker would choose it."""

    __slots__ = ()

    def __hash__(self) -> int:
        return 7


def submit(rig: Rig, number: int, prompt: Int32Array, namespace: str) -> None:
    params = SamplingParams(max_new_tokens=3)
    rig.engine.submit(Request(number, prompt, params, seed=0, namespace=namespace))
    rig.tokens[number] = []


def steps_to_first_token(rig: Rig, number: int) -> int:
    steps = 0
    while not rig.tokens[number]:
        rig.step()
        steps += 1
    return steps


def cost(rig: Rig, number: int, prompt: Int32Array, namespace: str) -> tuple[int, int]:
    """(steps, prompt tokens computed) until a request's first token."""
    before = rig.engine.stats().counts.prefill_tokens
    submit(rig, number, prompt, namespace)
    steps = steps_to_first_token(rig, number)
    return steps, rig.engine.stats().counts.prefill_tokens - before


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kind", [str, Colliding])
def test_a_cached_prompt_is_no_sooner_for_anybody_else(kind: type[str], overlap: bool) -> None:
    rig = Rig(budget=BUDGET, overlap=overlap)
    cold = cost(rig, 1, PROMPT, kind("one"))
    rig.drain()
    other = cost(rig, 2, PROMPT, kind("other"))
    rig.drain()
    own = cost(rig, 3, PROMPT, kind("one"))
    rig.drain()
    assert other == cold == (cold[0], 18)
    assert own[0] < cold[0] and own[1] == 2  # of five pages the last
    assert rig.cached == {1: 0, 2: 0, 3: 16}
    assert rig.tokens[2] == rig.tokens[1]


@pytest.mark.parametrize("kind", [str, Colliding])
def test_a_prompt_under_way_is_waited_for_by_nobody_else(kind: type[str]) -> None:
    """To wait for it would tell that somebody asks the same; so would not to compute it."""
    costs = []
    for begun in (PROMPT, OTHER):
        rig = Rig(budget=BUDGET)
        submit(rig, 1, begun, kind("one"))
        rig.step()
        costs.append(cost(rig, 2, PROMPT, kind("other")))
        rig.drain()
        assert rig.cached == {1: 0, 2: 0}
    assert costs[0] == costs[1]
    rig = Rig(budget=BUDGET)
    submit(rig, 1, PROMPT, kind("one"))
    rig.step()
    submit(rig, 2, PROMPT, kind("one"))
    rig.drain()
    assert rig.cached == {1: 0, 2: 16}


def test_names_that_run_together_are_no_others_name() -> None:
    """A namespace and the tokens behind it are two things, however they would be written."""
    rig = Rig()
    tokens = PROMPT.copy()
    for number, namespace in enumerate(("", "0", "1", "\0", "a/b", "a", "b")):
        submit(rig, number, tokens, namespace)
        rig.drain()
    assert set(rig.cached.values()) == {0}
