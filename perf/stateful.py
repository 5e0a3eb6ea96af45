"""Runs the stateful tests for as long as a night has room for, and keeps a record.

    python -m perf.stateful --operations 100000

Of the scheduler, also with hardly any memory and with long pages, of the prefix cache, and of its
tier in host memory. After every operation everything is checked, and at the end of each of the
scheduler's examples every request's answer against that of a lone run. A failure shows the
operations that led to it, and the round's seed.
"""

import time
from typing import Any, Final

import click

from perf.results import save
from tests.engine.test_host_tier_stateful import TierMachine
from tests.engine.test_prefix_cache_stateful import CacheMachine
from tests.engine.test_scheduler_stateful import (
    LongPagesMachine,
    PressedMachine,
    SchedulerMachine,
)
from tests.stateful import EXAMPLES, STEPS, CountedMachine, run_operations

# Each with its share of the operations.
MACHINES: Final[dict[type[CountedMachine], float]] = {
    SchedulerMachine: 0.3, PressedMachine: 0.2, LongPagesMachine: 0.1,
    TierMachine: 0.2, CacheMachine: 0.2,
}  # fmt: skip


def measure(machine: type[CountedMachine], operations: int) -> dict[str, Any]:
    begun_s = time.monotonic()
    done, seeds = run_operations(machine, operations)
    wall_s = time.monotonic() - begun_s
    print(f"{machine.__name__}: {done} operations in {wall_s:.0f} s", flush=True)
    return {"operations": done, "seeds": seeds, "wall_s": wall_s}


@click.command()
@click.option("--operations", default=100_000, help="Of all machines together.")
def main(operations: int) -> None:
    machines = {
        machine.__name__: measure(machine, int(share * operations))
        for machine, share in MACHINES.items()
    }
    figures = {
        "operations": sum(each["operations"] for each in machines.values()),
        "examples_a_round": EXAMPLES,
        "operations_an_example_at_most": STEPS,
        "machines": machines,
        "failures": 0,  # the first one ends the run
    }
    print(save("stateful", figures))


if __name__ == "__main__":
    main()
