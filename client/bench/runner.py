"""Runs a load from the main thread: starts its threads, shows how far it is, collects samples."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from client.bench.load import Asking, LoadThread, Sample
from client.bench.strain import Strain, worst
from client.bench.workload import Session, turns_in

_LOOK_S = 0.1
_BEGIN_S = 0.1  # for all threads to be there


@dataclass(frozen=True, slots=True)
class Pace:
    """How a load is spread: over threads, and over time."""

    concurrency: int | None  # sessions at a time; None: each at its planned time
    threads: int = 1
    ramp_up_s: float = 0.0

    def loads(self, asking: Asking, sessions: Sequence[Session]) -> list[LoadThread]:
        """A part of the load for each thread; no more threads than there is work for."""
        threads = max(1, min(self.threads, len(sessions), self.concurrency or self.threads))
        return [
            LoadThread(
                asking, sessions[index::threads],
                None if self.concurrency is None
                else len(range(index, self.concurrency, threads)),
                self.ramp_up_s,
            )
            for index in range(threads)
        ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Ran:
    """A load that has been sent: what came of it, and how hard it was for its threads."""

    samples: list[Sample]
    strain: Strain


def run_load(
    asking: Asking, sessions: Sequence[Session], pace: Pace, console: Console, title: str,
    *, transient: bool = False,
) -> Ran:  # fmt: skip
    """Sends all sessions and waits for every answer.

    transient  the bar goes once all have come, and is for terminals alone
    """
    loads = pace.loads(asking, sessions)
    start_s = time.perf_counter() + _BEGIN_S
    running = [load.start(start_s) for load in loads]
    with _progress(console, transient) as progress:
        bar = progress.add_task(title, total=turns_in(sessions), failed="")
        while any(thread.is_alive() for thread in running):
            _show(progress, bar, loads)
            time.sleep(_LOOK_S)
        _show(progress, bar, loads)
    for load in loads:
        if load.failure is not None:
            raise load.failure
    samples = [sample for load in loads for sample in load.samples]
    return Ran(samples, worst([load.strain for load in loads if load.strain is not None]))


def _progress(console: Console, transient: bool) -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("[red]{task.fields[failed]}"), console=console,
        transient=transient, disable=transient and not console.is_terminal,
    )  # fmt: skip


def _show(progress: Progress, bar: TaskID, loads: Sequence[LoadThread]) -> None:
    ended = [sample for load in loads for sample in tuple(load.samples)]
    failed = sum(sample.error is not None for sample in ended)
    progress.update(bar, completed=len(ended), failed=f"{failed} failed" if failed else "")
