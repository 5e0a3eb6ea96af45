"""A hostile hour: attackers of many kinds, and beside them one client that minds its own business.

    python -m perf.hostile --minutes 60                      # an engine that replays text
    python -m perf.hostile --minutes 5 --model FOLDER        # a real model

The attacks are those of perf.attacks, in a process of their own. Intervals without and with them
take turns, so that whatever else the machine does falls on both. The well-behaved client streams
one answer after another over one connection; its times between arrivals are compared.

Passes where
- its 99th percentile under attack is at most 1.5 times its own without;
- each of its answers is whole;
- the server's memory, at its last readings in peace, grows by no more than a line through them may
  by chance: SLOPE_MB a minute;
- moments after the last attack no request, row or page is held, and the server ends with exit code
  0 and no error in its log.

A real model computes for whoever asks, and on a CPU more rows make each step longer: there what the
HTTP loops do is hard to see. So the engine is a replay unless a model is given.
"""

import asyncio
import json
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import click
import httpx
import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from client.events import EventReader, StreamError, text_of
from client.target import Target, new_client
from perf.readings import REST_S, Reading, errors_in, is_at_rest, read_server
from perf.results import save
from perf.serving import Served, serving

RATIO: Final = 1.5
SLOPE_MB: Final = 0.5  # a minute: 30 MB in the hour
TOKENS: Final = 100  # of each answer of the well-behaved client
SETTLE_S: Final = 2.0  # after an attack, before it is peace
PERCENTILES: Final = (50, 99, 99.9, 100)


@dataclass
class Ledger:
    """What was seen. Owned by the loop."""

    gaps_s: dict[bool, list[float]] = field(default_factory=lambda: {False: [], True: []})
    errors: list[str] = field(default_factory=list)
    readings: list[Reading] = field(default_factory=list)  # in peace
    attacks: Counter[str] = field(default_factory=Counter)
    rest_s: float | None = None


async def behave(target: Target, seconds: float, gaps_s: list[float], errors: list[str]) -> None:
    """One answer after another on one connection; the last begins before `seconds` are over."""
    until_s = time.perf_counter() + seconds
    async with new_client(target) as client:
        while time.perf_counter() < until_s:
            try:
                gaps_s += np.diff(await _arrivals_s(client, target)).tolist()
            except (httpx.HTTPError, StreamError) as error:
                errors.append(f"{type(error).__name__}: {error}")


async def _arrivals_s(client: httpx.AsyncClient, target: Target) -> list[float]:
    """When each part of an answer came that brought text. Raises where it is not whole."""
    body = {
        "model": target.model, "prompt": list(range(100, 120)), "max_tokens": TOKENS,
        "ignore_eos": True, "stream": True,
    }  # fmt: skip
    events, arrivals_s = EventReader(), []
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise StreamError(f"{response.status_code}: {(await response.aread()).decode()}")
        async for part in response.aiter_raw():
            if any(text_of(chunk) for chunk in events.feed(part)):
                arrivals_s.append(time.perf_counter())
    if not events.is_done:
        raise StreamError(f"an answer ended after {len(arrivals_s)} parts, without its end")
    return arrivals_s


class Attackers:
    """The process of perf.attacks. Owned by the loop."""

    def __init__(self, target: Target, niceness: int, seed: int, only: str | None) -> None:
        parts = urlsplit(target.url)
        command = [
            "nice", "-n", str(niceness), sys.executable, "-m", "perf.attacks",
            str(parts.hostname), str(parts.port), "--model", target.model, "--seed", str(seed),
            *([] if only is None else ["--only", only]),
        ]  # fmt: skip
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def begin(self, seconds: float) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{seconds}\n")
        self._process.stdin.flush()

    async def wait_done(self) -> dict[str, int]:
        """How often each attack was made."""
        assert self._process.stdout is not None
        line = await asyncio.to_thread(self._process.stdout.readline)
        done: dict[str, int] = json.loads(line)
        return done

    def close(self) -> None:
        self._process.communicate()


async def interval(
    target: Target, ledger: Ledger, seconds: float, attackers: Attackers | None
) -> None:
    """Of peace, without attackers, or of attack."""
    if attackers is not None:
        attackers.begin(seconds)
    await behave(target, seconds, ledger.gaps_s[attackers is not None], ledger.errors)
    if attackers is not None:
        ledger.attacks.update(await attackers.wait_done())
        await asyncio.sleep(SETTLE_S)


async def endure(
    target: Target, served: Served, attackers: Attackers, minutes: float, interval_s: float
) -> Ledger:
    ledger = Ledger()
    until_s = time.monotonic() + 60 * minutes
    async with new_client(Target(served.url, served.model, http2=False)) as reader:
        with Progress() as progress:
            bar = progress.add_task("enduring", total=60 * minutes)
            while time.monotonic() < until_s:
                await interval(target, ledger, interval_s, None)
                ledger.readings.append(await read_server(served, reader))
                await interval(target, ledger, interval_s, attackers)
                left_s = until_s - time.monotonic()
                told = f"p99 {percentile(ledger, False):.1f} and {percentile(ledger, True):.1f} ms"
                progress.update(bar, completed=60 * minutes - left_s, description=told)
        ended_s = time.monotonic()
        while time.monotonic() - ended_s < REST_S and ledger.rest_s is None:
            ledger.readings.append(await read_server(served, reader))
            if is_at_rest(ledger.readings[-1]):
                ledger.rest_s = time.monotonic() - ended_s
            await asyncio.sleep(0.1)
    return ledger


def percentile(ledger: Ledger, attacked: bool, of: float = 99) -> float:
    """Of the times between arrivals, ms."""
    return float(np.percentile(ledger.gaps_s[attacked] or [0.0], of)) * 1e3


def slope_mb(readings: list[Reading]) -> float:
    """Of a line through the memory in use in the second half of the time, MB a minute."""
    late = readings[len(readings) // 2 :]
    if len(late) < 3:
        return 0.0
    minutes = [reading.at_s / 60 for reading in late]
    return float(np.polyfit(minutes, [reading.rss_mb for reading in late], 1)[0])


def judge(ledger: Ledger, log: str) -> list[str]:
    """What is wrong, a line each."""
    wrong = [f"{len(ledger.errors)} errors, first: {ledger.errors[0]}"] if ledger.errors else []
    alone, attacked = percentile(ledger, False), percentile(ledger, True)
    if attacked > RATIO * alone:
        wrong.append(f"the 99th percentile is {attacked:.1f} ms under attack, {alone:.1f} without")
    if (slope := slope_mb(ledger.readings)) > SLOPE_MB:
        wrong.append(f"memory grows by {slope:.2f} MB a minute")
    if ledger.rest_s is None or ledger.rest_s > REST_S:
        wrong.append(f"not at rest {REST_S:g} s after the last attack")
    return wrong + errors_in(log)


def figures_of(ledger: Ledger, log: str) -> dict[str, Any]:
    by_kind = {
        name: {f"p{of:g}_ms": percentile(ledger, attacked, of) for of in PERCENTILES}
        | {"gaps": len(ledger.gaps_s[attacked])}
        for name, attacked in (("alone", False), ("attacked", True))
    }
    return {
        **by_kind,
        "p99_ratio": percentile(ledger, True) / max(percentile(ledger, False), 1e-9),
        "attacks": dict(ledger.attacks),
        "rss_mb": [round(reading.rss_mb, 1) for reading in ledger.readings],
        "rss_slope_mb_per_minute": slope_mb(ledger.readings),
        "fds": [reading.fds for reading in ledger.readings],
        "at_rest_s": ledger.rest_s,
        "errors": ledger.errors[:20],
        "log_warnings": sum(" WARNING " in line for line in log.splitlines()),
        "wrong": judge(ledger, log),
    }


@click.command()
@click.option("--minutes", default=60.0, show_default=True)
@click.option("--interval-s", default=20.0, show_default=True, help="Of peace, and of attack.")
@click.option("--model", type=click.Path(path_type=Path), help="Checkpoint; else text is replayed.")
@click.option("--step-ms", default=20.0, show_default=True, help="Between replayed tokens.")
@click.option("--http2", is_flag=True, help="The well-behaved client speaks HTTP/2.")
@click.option("--niceness", default=10, show_default=True,
              help="Of the attackers, whose load on the CPU is not what is measured.")  # fmt: skip
@click.option("--seed", default=0, show_default=True)
@click.option("--only", help="One attack of perf.attacks, by its name.")
@click.option("--name", default="hostile", show_default=True, help="Of the JSON.")
@click.argument("server_flags", nargs=-1)
def main(
    minutes: float, interval_s: float, model: Path | None, step_ms: float, http2: bool,
    niceness: int, seed: int, only: str | None, name: str, server_flags: tuple[str, ...],
) -> None:  # fmt: skip
    """Attacks a server for a while; SERVER_FLAGS go to it."""
    if model is None:
        module, flags = "perf.frontend_server", ["--step-ms", str(step_ms)]
    else:
        module, flags = "runtime.serve", ["--model", str(model)]
    with serving([*flags, *server_flags], module) as served:
        assert served.log is not None
        target = Target(served.url, served.model, http2)
        attackers = Attackers(target, niceness, seed, only)
        try:
            ledger = asyncio.run(endure(target, served, attackers, minutes, interval_s))
        finally:
            attackers.close()
        log = served.log.read_text()
    figures = figures_of(ledger, log)
    table = Table("figure", "value", title=f"{minutes:g} minutes")
    for key, value in figures.items():
        table.add_row(key, str(value))
    Console().print(table)
    print(save(name, {
        "minutes": minutes, "interval_s": interval_s, "http2": http2, "niceness": niceness,
        "seed": seed, "only": only,
        "model": model.name if model else None, "step_ms": step_ms, "server_flags": server_flags,
        **figures,
    }))  # fmt: skip
    if figures["wrong"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
