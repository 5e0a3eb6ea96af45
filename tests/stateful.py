"""How long stateful tests go on, and from which seeds.

    PLAIT_STATEFUL_OPERATIONS=100000 ./plait test tests/engine/test_scheduler_stateful.py
    ./plait run python -m perf.stateful --operations 100000      # the same, with a record

Operations come in rounds, each from a seed of its own that a failure names. A seed that found
something goes into KEPT_SEEDS, which every run begins with, so that it is never lost.
"""

import os
import random
from typing import Any, ClassVar, Final

from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, run_state_machine_as_test

OPERATIONS: Final = int(os.environ.get("PLAIT_STATEFUL_OPERATIONS", "3000"))
STEPS: Final = 30  # operations of one example at most
EXAMPLES: Final = 100  # of a round

KEPT_SEEDS: Final = (
    3_471_848_540,  # who had to start and who was more urgent took turns for ever
)


class CountedMachine(RuleBasedStateMachine):
    """A machine that counts its operations in `tally`. Owned by the test's thread."""

    tally: ClassVar[list[int]]

    @invariant()
    def count(self) -> None:
        self.tally[0] += 1


def run_operations(machine: type[CountedMachine], operations: int) -> tuple[int, list[int]]:
    """Runs at least so many operations; how many it were, and the seeds of the rounds."""
    tally, seeds = [0], []
    fresh = random.SystemRandom()
    while tally[0] < operations or len(seeds) <= len(KEPT_SEEDS):
        kept = KEPT_SEEDS[len(seeds) :]
        seeds.append(kept[0] if kept else fresh.getrandbits(32))
        _run_round(machine, tally, seeds[-1])
    return tally[0], seeds


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
