"""What a server process holds, as it is seen from outside: memory, files, requests and pages."""

import time
from dataclasses import dataclass
from typing import Final

import httpx
import psutil  # type: ignore[import-untyped]

from perf.serving import Served

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
    process = psutil.Process(served.pid)
    occupancy = (await client.get("/health")).json()["occupancy"]
    with process.oneshot():
        return Reading(
            time.monotonic(), process.memory_info().rss / 1e6, process.num_fds(),
            process.num_threads(), occupancy,
        )  # fmt: skip


def is_at_rest(reading: Reading) -> bool:
    told = reading.occupancy
    held = told["requests"] or told["running"] or told["waiting"]
    return not held and told["available_pages"] == told["total_pages"]
