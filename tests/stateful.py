"""How long stateful tests go on, and from which seeds.

    PLAIT_STATEFUL_OPERATIONS=100000 ./plait test tests/engine/test_scheduler_stateful.py
    ./plait run python -m perf.stateful --operations 100000      # all machines, with a record

Operations come in rounds, each from a seed of its own that a failure names. A seed that found
something goes into its machine's `kept_seeds`, which every run begins with, so that it is never
lost. (It says the same operations only as long as the machine draws the same things.)
"""

import os
import random
from typing import Any, ClassVar, Final

from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, run_state_machine_as_test

OPERATIONS: Final = int(os.environ.get("PLAIT_STATEFUL_OPERATIONS", "2000"))
STEPS: Final = 30  # operations of one example at most
EXAMPLES: Final = 100  # of a round


class CountedMachine(RuleBasedStateMachine):
    """A machine that counts its operations in `tally`. Owned by the test's thread."""

    tally: ClassVar[list[int]]
    kept_seeds: ClassVar[tuple[int, ...]] = ()  # of rounds that found something once

    @invariant()
    def count(self) -> None:
        self.tally[0] += 1


def run_operations(machine: type[CountedMachine], operations: int) -> tuple[int, list[int]]:
    """Runs at least so many operations; how many it were, and the seeds of the rounds."""
    tally = [0]
    seeds: list[int] = []
    fresh = random.SystemRandom()
    while tally[0] < operations or len(seeds) <= len(machine.kept_seeds):
        kept = machine.kept_seeds[len(seeds) :]
        seeds.append(kept[0] if kept else fresh.getrandbits(32))
        _run_round(machine, tally, seeds[-1])
    return tally[0], seeds


def run_a_few(machine: type[CountedMachine]) -> None:
    """As many as every run of the tests does, or as the environment says. Asserts that it did."""
    done, _ = run_operations(machine, OPERATIONS)
    assert done >= OPERATIONS


def _run_round(machine: type[CountedMachine], tally: list[int], number: int) -> None:
    seeded: Any = seed(number)(type(machine.__name__, (machine,), {"tally": tally}))
    limits = settings(
        max_examples=EXAMPLES,
        stateful_step_count=STEPS,
        deadline=None,
        database=None,  # a seed says all
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
    try:
        run_state_machine_as_test(seeded, settings=limits)  # type: ignore[no-untyped-call]
    except Exception as error:
        error.add_note(f"in the round of seed {number}: tests/stateful.py keeps such seeds")
        raise
