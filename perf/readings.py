"""What a server holds, as seen from outside: memory, files, requests, pages; and its log."""

import time
from dataclasses import dataclass
from typing import Any, Final

import httpx
import psutil

from perf.serving import Served

LASTING_S: Final = 3.0  # longer than the trial of a grammar, which is a process of its own
REST_S: Final = 10.0  # 200 leave at once, of a busy machine; for one, tests/e2e says 1 s


@dataclass(frozen=True, slots=True)
class Reading:
    """What the server held at one moment."""

    at_s: float
    rss_mb: float
    fds: int
    threads: int
    occupancy: dict[str, int]


async def read_server(served: Served, client: httpx.AsyncClient) -> Reading:
    """What it holds now, all of its processes together."""
    occupancy = (await client.get("/health")).json()["occupancy"]
    rss_mb, fds, threads = 0.0, 0, 0
    for process in processes_of(served):
        with process.oneshot():
            rss_mb += process.memory_info().rss / 1e6
            fds += process.num_fds()
            threads += process.num_threads()
    return Reading(time.monotonic(), rss_mb, fds, threads, occupancy)


def processes_of(served: Served) -> list[Any]:
    """The server's process, or with `--tp` also its ranks: those that have lived for long."""
    first = psutil.Process(served.pid)
    started = time.time() - LASTING_S
    return [first, *(child for child in first.children() if child.create_time() < started)]


def is_at_rest(reading: Reading) -> bool:
    told = reading.occupancy
    held = told["requests"] or told["running"] or told["waiting"]
    return not held and told["available_pages"] == told["total_pages"]


def errors_in(log: str) -> list[str]:
    """The first line of each kind that a server's log should have none of."""
    kinds = ("ERROR", "CRITICAL", "Traceback")
    found = (next((line for line in log.splitlines() if kind in line), None) for kind in kinds)
    return [f"the log says: {line}" for line in found if line is not None]
