"""Host time of one step: `plan` + encode + `commit`, without a device and without torch.

    python -m perf.bench_scheduler

Each batch size runs decode steps of requests that neither start nor end; some rows cross
a page boundary in every step, as in a live batch; medians and p99 over all steps.

Then the same with a queue: 256 run while 10,000 wait and a million tokens are cached; requests end
in some steps, and others take their place. Also with shorter queues and none, for the growth; and
with a pool that holds a tenth of the cached tokens, the rest of which is in host memory. And what a
trace adds, which is to be no more than a fiftieth: two engines take turns, step by step, so that
whatever else the machine does falls on both.
"""

import time
from typing import Any, Literal

import click
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from rich.table import Table

from engine.cache_factory import HostMemory, build_prefix_cache
from engine.config import SCHEDULE_POLICIES
from engine.core import Engine, EngineFacts
from engine.pages import PagePool
from engine.request import Int32Array, Request, SamplingParams
from engine.scheduler import Scheduler
from perf.results import save

BUDGET_MS = {256: 0.2, 1024: 0.8}
WARM_UP = 100  # steps
FACTS = EngineFacts(0, 0, 1000, 64, "none", "none", False)  # nothing here reads them


class EchoStep:
    """A step that is done at once and says token 7 for every row."""

    def __init__(self, tokens: Int32Array) -> None:
        self._tokens = tokens

    def wait_tokens_sync(self) -> Int32Array:
        return self._tokens

    def wait_logprobs_sync(self) -> None:
        return None


class EchoExecutor:
    """Does nothing, quickly: what is left is the host's time."""

    vocab_size = 1000

    def __init__(self, pages: int, page_size: int) -> None:
        self.pages, self.page_size = pages, page_size
        self._tokens = np.full(4096, 7, np.int32)

    def launch_no_sync(self, descriptor: Int32Array) -> EchoStep:
        samples = int(descriptor[8]) + int(descriptor[6])
        return EchoStep(self._tokens[:samples])

    def close(self) -> None:
        pass


def decoding(batch: int, overlap: bool, trace_steps: int = 0) -> Engine:
    """An engine that decodes for `batch` requests, and will for thousands of steps."""
    page_size, context = 64, 4096
    pages = 1 + batch * context // page_size
    scheduler = Scheduler(
        pool=PagePool(pages),
        cache=build_prefix_cache("radix", page_size),
        max_running=batch,
        max_model_len=context,
        prefill_budget=None,
        eos_ids=(2,),
        vocab_size=0,
        trace_steps=trace_steps,
    )
    engine = Engine(scheduler, EchoExecutor(pages, page_size), overlap=overlap, facts=FACTS)
    rng = np.random.default_rng(0)
    for number in range(batch):
        # Lengths differ, so that rows cross a page boundary in different steps.
        prompt = rng.integers(10, 1000, int(rng.integers(64, 256))).astype(np.int32)
        engine.submit(Request(number, prompt, SamplingParams(max_new_tokens=3800), seed=number))
    while engine.stats().running < batch:
        engine.step()
    for _ in range(WARM_UP):
        engine.step()
    return engine


def measure(batch: int, steps: int, overlap: bool) -> dict[str, Any]:
    """Times `steps` decode steps over `batch` running requests."""
    (times,) = _timed([decoding(batch, overlap)], batch, steps)
    return {
        "batch": batch,
        "overlap": overlap,
        "median_ms": float(np.median(times) * 1e3),
        "p99_ms": float(np.quantile(times, 0.99) * 1e3),
        "budget_ms": BUDGET_MS.get(batch),
    }


def measure_trace(batch: int, steps: int) -> dict[str, Any]:
    """Decode steps without a trace and with one that is full, in turn.

    Besides medians, the lower quartiles: there, less of what is counted is the machine's.
    """
    without, traced = _timed(
        [decoding(batch, True), decoding(batch, True, trace_steps=WARM_UP)], batch, steps
    )
    found: dict[str, Any] = {"batch": batch}
    for name, share in (("median", 0.5), ("lower_quartile", 0.25)):
        bare, more = float(np.quantile(without, share)), float(np.quantile(traced, share))
        found |= {f"{name}_ms": 1e3 * bare, f"{name}_traced_ms": 1e3 * more,
                  f"{name}_adds": more / bare - 1}  # fmt: skip
    return found


def _timed(engines: list[Engine], batch: int, steps: int) -> NDArray[np.float64]:
    """[engines, steps] seconds; who goes first changes from step to step."""
    times = np.empty((len(engines), steps))
    order = list(enumerate(engines))
    for index in range(steps):
        for which, engine in order:
            begun = time.perf_counter()
            output = engine.step()
            times[which, index] = time.perf_counter() - begun
            assert output is not None and len(output.token_ids) == batch
        order.reverse()
    for engine in engines:
        engine.check_integrity()
    return times


def measure_queue(
    policy: str, waiting: int, steps: int, write: Literal["through", "back"] | None = None
) -> dict[str, Any]:
    """Times `steps` steps in which requests start and end while many wait.

    write  of a host tier; None: there is none
    """
    page_size, running, cached = 64, 256, 1_000_000
    on_device = cached if write is None else cached // 10
    pages = 1 + (on_device + running * 1024) // page_size
    host = None if write is None else HostMemory(cached // page_size, write)
    scheduler = Scheduler(
        pool=PagePool(pages),
        cache=build_prefix_cache("radix", page_size, "lru", host),
        max_running=running,
        max_model_len=4096,
        prefill_budget=None,  # the executor knows no chunks
        eos_ids=(2,),
        vocab_size=0,
        policy=policy,
    )
    engine = Engine(scheduler, EchoExecutor(pages, page_size), overlap=True, facts=FACTS)
    rng = np.random.default_rng(0)
    beginnings = [rng.integers(10, 1000, 512).astype(np.int32) for _ in range(100)]

    def submit(number: int, new: int) -> None:
        own = rng.integers(10, 1000, 64).astype(np.int32)
        prompt = np.concatenate([beginnings[int(rng.integers(100))], own])
        params = SamplingParams(
            max_new_tokens=new, priority=number % 5, routing_key=f"{number % 7}"
        )
        engine.submit(Request(number, prompt, params, seed=number))

    _fill_cache(scheduler, rng, cached)
    for number in range(running):
        submit(number, int(rng.integers(steps // 2, 2 * steps)))
    while engine.stats().running < running:
        engine.step()
    for number in range(running, running + waiting):
        submit(number, int(rng.integers(steps // 2, 2 * steps)))
    times = np.empty(steps)
    for index in range(steps):
        begun = time.perf_counter()
        engine.step()
        times[index] = time.perf_counter() - begun
    scheduler.check_integrity()
    return {
        "policy": policy,
        "host_tier": write or "none",
        "waiting": waiting,
        "cached_tokens": scheduler.holdings.cache.cached_pages * page_size,
        "host": scheduler.holdings.cache.host_counts._asdict(),
        "started": waiting - engine.stats().waiting,
        "median_ms": float(np.median(times) * 1e3),
        "p90_ms": float(np.quantile(times, 0.9) * 1e3),
        "mean_ms": float(times.mean() * 1e3),
    }


def _fill_cache(scheduler: Scheduler, rng: np.random.Generator, tokens: int) -> None:
    """Puts prompts into the prefix cache that nobody asks for."""
    cache = scheduler.holdings.cache
    for _ in range(tokens // 2048):
        prompt = rng.integers(10, 1000, 2048).astype(np.int32)
        cache.insert("", prompt, scheduler.holdings.take_pages(2048 // cache.page_size))
        cache.take_copies()  # a step's, which nobody makes here


@click.command()
@click.option("--steps", default=1000, type=click.IntRange(1, 3000), help="Timed per batch size.")
def main(steps: int) -> None:
    cells = [(b, overlap) for b in (16, 32, 64, 128, 256, 512, 1024) for overlap in (False, True)]
    rows = [measure(b, steps, overlap) for b, overlap in track(cells, "scheduler")]
    trace = measure_trace(256, steps)
    queues = [measure_queue("fcfs", waiting, steps) for waiting in (0, 100, 1000)]
    queues += [measure_queue(policy, 10_000, steps) for policy in track(SCHEDULE_POLICIES, "queue")]
    queues += [measure_queue("fcfs", waiting, steps, "through") for waiting in (0, 10_000)]
    queues += [measure_queue("fcfs", waiting, steps, "back") for waiting in (0, 10_000)]
    table = Table("running", "overlap", "median ms", "p99 ms", "budget ms", title="host per step")
    for row in rows:
        table.add_row(
            str(row["batch"]),
            "on" if row["overlap"] else "off",
            f"{row['median_ms']:.3f}",
            f"{row['p99_ms']:.3f}",
            "" if row["budget_ms"] is None else str(row["budget_ms"]),
        )
    Console().print(table)
    columns = ("policy", "host tier", "waiting", "started", "median ms", "mean ms", "p90 ms")
    table = Table(*columns, title="queues")
    for row in queues:
        times = [f"{row[name]:.3f}" for name in ("median_ms", "mean_ms", "p90_ms")]
        counts = str(row["waiting"]), str(row["started"])
        table.add_row(row["policy"], row["host_tier"], *counts, *times)
    Console().print(table)
    print(f"a trace adds {trace['median_adds']:.1%}, {trace['lower_quartile_adds']:.1%} at the "
          "lower quartile")  # fmt: skip
    figures = {"steps": steps, "rows": rows, "trace": trace, "queues": queues}
    print(save("bench_scheduler", figures))


if __name__ == "__main__":
    main()
