"""Rings between threads against `collections.deque` and `queue.SimpleQueue`.

`python -m perf.bench_channel [--items N] [--rounds N]`

alone       a thread sends 64 items to itself and takes them out, as after a step
throughput  one thread sends, one receives; neither sleeps, and the ring has room for all items, as
            the others have: a bounded ring would also measure when the threads get a core
ping-pong   two threads and two channels; each side sleeps until the other's item comes: a ring on
            its eventfd, a SimpleQueue in `get`. A deque has no way to sleep, so it is polled.

Each figure is the best of several runs: what disturbs a run only makes it longer. Every run checks
that all items came, in order.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Final

import click
from rich.console import Console
from rich.progress import track
from rich.table import Table

from perf.results import save
from runtime.channel import Channel
from runtime.inbox import Inbox, Wakeup

BATCH: Final = 64
RUNS: Final = 15

Push = Callable[[int], object]
PopAll = Callable[[], list[int]]
PopWait = Callable[[], int]


def ring_ends(capacity: int) -> tuple[Push, PopAll, PopWait]:
    wakeup = Wakeup()
    ring = Channel[int](capacity, wakeup)
    inbox = Inbox(wakeup, [ring.receiver])
    try_pop = ring.receiver.try_pop

    def pop_wait() -> int:
        while (item := try_pop()) is None:
            inbox.wait(10.0)
        return item

    try_push = ring.sender.try_push

    def push(item: int) -> None:
        if not try_push(item):
            assert ring.sender.push_wait(item, 60.0)

    return push, ring.receiver.pop_all, pop_wait


def deque_ends(capacity: int) -> tuple[Push, PopAll, PopWait]:
    items: deque[int] = deque()

    def pop_all() -> list[int]:
        found: list[int] = []
        try:
            while len(found) < capacity:
                found.append(items.popleft())
        except IndexError:
            pass
        return found

    def pop_wait() -> int:
        while True:
            try:
                return items.popleft()
            except IndexError:
                continue

    return items.append, pop_all, pop_wait


def queue_ends(capacity: int) -> tuple[Push, PopAll, PopWait]:
    items: SimpleQueue[int] = SimpleQueue()

    def pop_all() -> list[int]:
        found: list[int] = []
        try:
            while len(found) < capacity:
                found.append(items.get_nowait())
        except Empty:
            pass
        return found

    return items.put, pop_all, items.get


KINDS: Final = {"channel": ring_ends, "deque": deque_ends, "SimpleQueue": queue_ends}


def throughput_ns(kind: str, count: int) -> float:
    """Nanoseconds an item while one thread sends and another receives."""
    push, pop_all, _ = KINDS[kind](count)
    start = threading.Barrier(2)

    def send() -> None:
        start.wait()
        for item in range(count):
            push(item)

    sender = threading.Thread(target=send)
    sender.start()
    start.wait()
    began = time.perf_counter()
    expected = 0
    while expected < count:
        for item in pop_all():
            if item != expected:
                raise AssertionError(f"{kind}: {item} came in the place of {expected}")
            expected += 1
    took_s = time.perf_counter() - began
    sender.join()
    return took_s / count * 1e9


def alone_ns(kind: str, count: int) -> tuple[float, float]:
    """Nanoseconds a push, and nanoseconds an item received, without another thread."""
    push, pop_all, _ = KINDS[kind](BATCH)
    push_s = pop_s = 0.0
    for _ in range(count // BATCH):
        began = time.perf_counter()
        for item in range(BATCH):
            push(item)
        between = time.perf_counter()
        got = pop_all()
        pop_s += time.perf_counter() - between
        push_s += between - began
        assert len(got) == BATCH
    items = count // BATCH * BATCH
    return push_s / items * 1e9, pop_s / items * 1e9


def ping_pong_us(kind: str, rounds: int) -> tuple[float, float]:
    """Microseconds there and back: median and 99th percentile."""
    push_there, _, pop_there = KINDS[kind](4)
    push_back, _, pop_back = KINDS[kind](4)

    def echo() -> None:
        for _ in range(rounds):
            push_back(pop_there())

    echoing = threading.Thread(target=echo)
    echoing.start()
    times = []
    for item in range(rounds):
        began = time.perf_counter()
        push_there(item)
        if pop_back() != item:
            raise AssertionError(f"{kind}: another item came back")
        times.append(time.perf_counter() - began)
    echoing.join()
    times.sort()
    return times[rounds // 2] * 1e6, times[rounds * 99 // 100] * 1e6


def measure(kind: str, items: int, rounds: int) -> dict[str, float]:
    """All figures of one kind; the best run of each."""
    alone = [alone_ns(kind, items) for _ in range(RUNS)]
    pings = [ping_pong_us(kind, rounds) for _ in range(RUNS)]
    median, p99 = min(pings)
    return {
        "push_ns": min(push for push, _ in alone),
        "pop_ns": min(pop for _, pop in alone),
        "throughput_ns": min(throughput_ns(kind, items) for _ in range(RUNS)),
        "ping_pong_p50_us": median,
        "ping_pong_p99_us": p99,
    }


@click.command()
@click.option("--items", default=20_000, show_default=True, help="Items a throughput run.")
@click.option("--rounds", default=1_000, show_default=True, help="Rounds a ping-pong run.")
def main(items: int, rounds: int) -> None:
    """Measures channels between two threads."""
    console = Console()
    figures = {
        kind: measure(kind, items, rounds) for kind in track(KINDS, "Measuring", console=console)
    }
    table = Table("", *figures, title="Channels between two threads")
    for name in figures["channel"]:
        table.add_row(name, *(f"{figures[kind][name]:.1f}" for kind in figures))
    console.print(table)
    path = save("bench_channel", {"items": items, "rounds": rounds, **figures})
    console.print(f"written to {path.name}")


if __name__ == "__main__":
    main()
