"""Runs the scheduler's stateful test for as long as a night has room for, and keeps a record.

    python -m perf.stateful --operations 100000

After every operation everything is checked, and at the end of every example each request's answer
against that of a lone run. A failure shows the operations that led to it, and the round's seed.
"""

import time

import click

from perf.results import save
from tests.engine.test_scheduler_stateful import SchedulerMachine
from tests.stateful import EXAMPLES, STEPS, run_operations


@click.command()
@click.option("--operations", default=100_000)
def main(operations: int) -> None:
    begun_s = time.monotonic()
    done, seeds = run_operations(SchedulerMachine, operations)
    figures = {
        "machine": SchedulerMachine.__name__,
        "operations": done,
        "examples_a_round": EXAMPLES,
        "operations_an_example_at_most": STEPS,
        "seeds": seeds,
        "failures": 0,  # the first one ends the run
        "wall_s": time.monotonic() - begun_s,
    }
    print(save("stateful", figures))


if __name__ == "__main__":
    main()
