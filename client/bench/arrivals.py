"""When sessions begin, in an open loop: whatever the server does, as people do."""

import dataclasses
import random
from collections.abc import Sequence

from client.bench.workload import Session


def poisson(sessions: Sequence[Session], rate: tuple[float, float], seed: int) -> list[Session]:
    """The sessions, each with its time of a Poisson process.

    rate  sessions a second at the start and at the end; linear in the number of sessions between
    """
    dice, at_s, timed = random.Random(seed), 0.0, []
    low, high = rate
    for index, session in enumerate(sessions):
        share = index / max(1, len(sessions) - 1)
        at_s += dice.expovariate(low + (high - low) * share)
        timed.append(dataclasses.replace(session, at_s=at_s))
    return timed


def faster(sessions: Sequence[Session], speed: float) -> list[Session]:
    """Planned sessions with times and pauses divided by `speed`, and the first at 0.

    Raises ValueError where a session has no time.
    """
    times = [session.at_s for session in sessions if session.at_s is not None]
    if len(times) < len(sessions):
        raise ValueError("a session of the file has no time to begin at")
    first_s = min(times, default=0.0)
    return [
        dataclasses.replace(
            session,
            at_s=(at_s - first_s) / speed,
            turns=tuple(
                dataclasses.replace(turn, pause_s=turn.pause_s / speed) for turn in session.turns
            ),
        )
        for session, at_s in zip(sessions, times, strict=True)
    ]
