"""The real server with an engine that fails: `python -m tests.e2e.failing_server STEPS FLAG…`

STEPS  that succeed, those of warming up included
"""

import itertools
import sys

from engine.core import Engine
from engine.request import StepOutput
from runtime.serve import serve


class InjectedFault(Exception):
    """What the engine fails with."""


def main() -> None:
    steps = int(sys.argv.pop(1))
    count = itertools.count(1)
    real_step = Engine.step

    def step(engine: Engine) -> StepOutput | None:
        if next(count) > steps:
            raise InjectedFault(f"after {steps} steps")
        return real_step(engine)

    Engine.step = step  # type: ignore[assignment, method-assign]
    serve()


if __name__ == "__main__":
    main()
