"""Minutes of clients that come, leave and err: nothing may leak, nobody may be told a wrong word.

    python -m perf.soak --seconds 300                       # a small random model, much pressure
    python -m perf.soak --seconds 300 --model FOLDER -- --max-running 64
    python -m perf.soak --seconds 600 --ranks 2 --name soak_tp2      # the same with two processes
    python -m perf.soak --seconds 60 --ranks 4 --family qwen3-moe    # another architecture

Visitors live in houses of 25, half of them over HTTP/1.1, half over HTTP/2 with a connection a
house. A visitor asks one of a hundred questions whose greedy answers are known: one rank was asked
them before, one by one. Then it stays to the end, or leaves after some text, or loses patience at
some moment; some ask what must be refused. Now and then a whole house goes at once. The server has
few rows and fewer pages than they want, so requests wait, prefixes are evicted and the youngest are
retracted all the time.

Passes where
- each answer is the known one, or as far as it was read its beginning, and no other error occurred
  than those provoked;
- moments after all visitors went at once, no request, row or page is held, and no connection open;
- the server's memory did not grow from the second quarter of the time to the fourth;
- the server then ends with exit code 0, which it does only after a check of its own books, and
  with no error in its log.
"""

import asyncio
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import click
import httpx
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from client.events import EventReader, StreamError, text_of
from client.target import Target, new_client
from perf.readings import REST_S, Reading, errors_in, is_at_rest, read_server
from perf.results import save
from perf.serving import Served, serving
from tests.checkpoints import FAMILIES, build_checkpoint, save_tokenizer

HOUSE: Final = 25
CASES: Final = 100
VOCAB: Final = 256
FDS: Final = 4  # that may have been opened for good since the first reading
CLOSED_S: Final = 15.0  # for the server to close the connections that its clients have closed
# So heavy that requests wait for the engine, not the engine for the loops of clients and server.
MODEL: Final[dict[str, Any]] = {
    "max_position_embeddings": 512, "hidden_size": 192, "intermediate_size": 512,
    "num_hidden_layers": 6,
}  # fmt: skip
PRESSURE: Final = (
    "--page-size 8 --max-running 48 --max-kv-tokens 6144 --prefill-budget 128 --cpu-threads 1"
)
# Memory in use swings with the number of requests; what a leak of a kilobyte a request would add
# in five minutes is far more.
GROWTH: Final = 1.02


@dataclass(frozen=True, slots=True)
class Case:
    """A question and its answer."""

    body: dict[str, Any]
    text: str


@dataclass
class Ledger:
    """What happened. Owned by the loop."""

    ends: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    readings: list[Reading] = field(default_factory=list)  # the first: before the visitors
    after: Reading | None = None  # the last, when all had gone
    rest_s: float | None = None  # after the last visitor went, until nothing was held
    closed_s: float | None = None  # likewise, until no connection was open


class WrongAnswer(Exception):
    """The server said something else than it should."""


# Questions


async def make_cases(client: httpx.AsyncClient, model: str, seed: int) -> list[Case]:
    """Prompts with shared beginnings, each asked alone."""
    dice = random.Random(seed)
    stems = [[dice.randrange(VOCAB) for _ in range(dice.randint(20, 200))] for _ in range(6)]
    cases = []
    for _ in range(CASES):
        tail = [dice.randrange(VOCAB) for _ in range(dice.randint(1, 60))]
        body = {
            "model": model, "prompt": dice.choice(stems) + tail, "temperature": 0,
            "max_tokens": dice.randint(1, 60),
        }  # fmt: skip
        answer = await client.post("/v1/completions", json=body)
        cases.append(Case(body, answer.raise_for_status().json()["choices"][0]["text"]))
    return cases


def bad_body(case: Case, dice: random.Random) -> dict[str, Any]:
    """What must be refused with a 400."""
    wrong: dict[str, Any] = dice.choice([
        {"temperature": -1}, {"max_tokens": 0}, {"prompt": ""}, {"prompt": [10**9]},
        {"max_tokens": 10**6}, {"stop": 5}, {"n": 129},
    ])  # fmt: skip
    return {**case.body, **wrong}


# Visitors


class Visitor:
    """Asks again and again. Owned by the loop."""

    def __init__(
        self, client: httpx.AsyncClient, cases: list[Case], ledger: Ledger, dice: random.Random
    ) -> None:
        self._client = client
        self._cases = cases
        self._ledger = ledger
        self._dice = dice

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            try:
                self._ledger.ends[await self._visit()] += 1
            except (WrongAnswer, httpx.HTTPError) as error:
                self._ledger.ends["error"] += 1
                self._ledger.errors.append(f"{type(error).__name__}: {error}")

    async def _visit(self) -> str:
        """How it ended."""
        case, mood = self._dice.choice(self._cases), self._dice.random()
        if mood < 0.05:
            return await self._err(case)
        if mood < 0.20:
            return await self._ask_whole(case)
        if mood < 0.40:
            return await self._stream(case, self._dice.randrange(10))
        if mood < 0.60:
            try:
                async with asyncio.timeout(self._dice.random() ** 2 * 3):
                    whole = self._dice.random() < 0.3
                    return await (self._ask_whole(case) if whole else self._stream(case, None))
            except TimeoutError:
                return "lost patience"
        return await self._stream(case, None)

    async def _err(self, case: Case) -> str:
        answer = await self._client.post("/v1/completions", json=bad_body(case, self._dice))
        if answer.status_code != 400 or not answer.json()["error"]["message"]:
            raise WrongAnswer(f"{answer.status_code} instead of 400: {answer.text}")
        return "was refused"

    async def _ask_whole(self, case: Case) -> str:
        answer = await self._client.post("/v1/completions", json=case.body)
        if answer.status_code != 200 or answer.json()["choices"][0]["text"] != case.text:
            raise WrongAnswer(f"{answer.status_code}: {answer.text} instead of {case.text!r}")
        return "took a whole answer"

    async def _stream(self, case: Case, patience: int | None) -> str:
        """patience  events to be read; None: to the end"""
        text, body = "", {**case.body, "stream": True}
        async with self._client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                raise WrongAnswer(f"{response.status_code}: {(await response.aread()).decode()}")
            events, reader = 0, EventReader()
            async for part in response.aiter_raw():
                for chunk in chunks_in(part, reader):
                    text += text_of(chunk)
                    events += 1
                    if not case.text.startswith(text):
                        raise WrongAnswer(f"{text!r}, which is no beginning of {case.text!r}")
                    if patience is not None and events > patience:
                        return "left a stream"
                if reader.is_done:
                    if text != case.text:
                        raise WrongAnswer(f"{text!r} instead of {case.text!r}")
                    return "read a stream"
        raise WrongAnswer(f"the stream ended after {text!r}, without its end")


def chunks_in(part: bytes, reader: EventReader) -> list[dict[str, Any]]:
    """What a part of a stream completes. Raises WrongAnswer for an error."""
    try:
        return reader.feed(part)
    except StreamError as error:
        raise WrongAnswer(str(error)) from error


async def house(target: Target, cases: list[Case], ledger: Ledger, seed: int) -> None:
    """HOUSE visitors, who now and then all go at once, their connections with them."""
    dice = random.Random(seed)
    while True:
        async with new_client(target) as client:
            visitors = [
                Visitor(client, cases, ledger, random.Random(dice.random())) for _ in range(HOUSE)
            ]
            try:
                async with asyncio.timeout(dice.uniform(5, 30)), asyncio.TaskGroup() as group:
                    for visitor in visitors:
                        group.create_task(visitor.run())
            except TimeoutError:
                ledger.ends["a house left"] += 1


# The server, as it is seen


async def watch(served: Served, ledger: Ledger, seconds: float) -> None:
    """A reading a second."""
    target = Target(served.url, served.model, http2=False)
    until_s = time.monotonic() + seconds
    async with new_client(target) as client:
        with Progress() as progress:
            bar = progress.add_task("soaking", total=seconds)
            while (left_s := until_s - time.monotonic()) > 0:
                ledger.readings.append(await read_server(served, client))
                bad = f", {len(ledger.errors)} errors" if ledger.errors else ""
                visits = sum(ledger.ends.values())
                progress.update(
                    bar, completed=seconds - left_s, description=f"{visits} visits{bad}"
                )
                await asyncio.sleep(min(1.0, left_s))


async def known_answers(served: Served, seed: int) -> list[Case]:
    async with new_client(Target(served.url, served.model, http2=False)) as client:
        return await make_cases(client, served.model, seed)


async def soak(
    served: Served, cases: list[Case], streams: int, seconds: float, seed: int
) -> Ledger:
    """What happened, from before the first visitor came to after the last one went."""
    ledger = Ledger()
    targets = [Target(served.url, served.model, http2=http2) for http2 in (False, True)]
    async with new_client(targets[0]) as alone:
        ledger.readings.append(await read_server(served, alone))
    houses = [
        asyncio.create_task(house(targets[n % 2], cases, ledger, seed + n))
        for n in range(streams // HOUSE)
    ]
    await watch(served, ledger, seconds)
    for each in houses:
        each.cancel()
    for outcome in await asyncio.gather(*houses, return_exceptions=True):
        if not isinstance(outcome, asyncio.CancelledError):
            ledger.errors.append(f"a house fell: {outcome!r}")
    await watch_rest(served, ledger)
    return ledger


async def watch_rest(served: Served, ledger: Ledger) -> None:
    """Readings until all is as before the first visitor."""
    async with new_client(Target(served.url, served.model, http2=False)) as client:
        gone_s = time.monotonic()
        while True:
            ledger.after = reading = await read_server(served, client)
            if ledger.rest_s is None and is_at_rest(reading):
                ledger.rest_s = reading.at_s - gone_s
            if ledger.rest_s is not None and reading.fds <= ledger.readings[0].fds + FDS:
                ledger.closed_s = reading.at_s - gone_s
                return
            if reading.at_s - gone_s > CLOSED_S:
                ledger.errors.append(f"{CLOSED_S:g} s after all have gone: {reading}")
                return


# Verdict


def quarters(readings: list[Reading], name: str) -> list[float]:
    """The median of a reading in each quarter of the time."""
    size = max(1, len(readings) // 4)
    return [
        statistics.median(getattr(r, name) for r in readings[start : start + size])
        for start in range(0, 4 * size, size)
    ]


def judge(ledger: Ledger, log: str) -> list[str]:
    """What is wrong, a line each."""
    wrong = [f"{len(ledger.errors)} errors, first: {ledger.errors[0]}"] if ledger.errors else []
    if ledger.rest_s is None or ledger.rest_s > REST_S:
        wrong.append(f"not at rest {REST_S:g} s after the last visitor went")
    _, second, _, fourth = quarters(ledger.readings, "rss_mb")
    if fourth > second * GROWTH:
        wrong.append(f"memory grew from {second:.0f} MB in the second quarter to {fourth:.0f} MB")
    return wrong + errors_in(log)


def figures_of(ledger: Ledger, log: str) -> dict[str, Any]:
    most = {
        name: max(r.occupancy[name] for r in ledger.readings)
        for name in ("requests", "running", "waiting")
    }
    fewest = min(r.occupancy["available_pages"] for r in ledger.readings)
    assert ledger.after is not None
    warnings = [line for line in log.splitlines() if " WARNING " in line]
    return {
        "ends": dict(ledger.ends.most_common()),
        "visits": sum(ledger.ends.values()),
        "most_at_a_time": most,
        "fewest_available_pages": fewest,
        "rss_mb_by_quarter": quarters(ledger.readings, "rss_mb"),
        "fds_by_quarter": quarters(ledger.readings, "fds"),
        "fds_before_and_after": [r.fds for r in (ledger.readings[0], ledger.after)],
        "threads_before_and_after": [r.threads for r in (ledger.readings[0], ledger.after)],
        "at_rest_s": ledger.rest_s,
        "connections_closed_s": ledger.closed_s,
        "log_warnings": len(warnings),
        "first_warnings": warnings[:3],
        "errors": ledger.errors[:20],
        "wrong": judge(ledger, log),
    }


@contextmanager
def checkpoint(model: Path | None, family: str = "llama") -> Iterator[Path]:
    """The model, or a small random one of a family, with a byte-level tokenizer."""
    if model is not None:
        yield model
        return
    with tempfile.TemporaryDirectory(prefix="plait-") as folder:
        made = build_checkpoint(Path(folder) / "small", family, **MODEL)
        save_tokenizer(made)
        yield made


@click.command()
@click.option("--model", type=click.Path(path_type=Path), help="Checkpoint; else a random one.")
@click.option("--family", type=click.Choice(list(FAMILIES)), default="llama", show_default=True,
              help="Of the random checkpoint.")  # fmt: skip
@click.option("--seconds", default=300.0, show_default=True)
@click.option("--streams", default=200, show_default=True, help=f"A multiple of {HOUSE}.")
@click.option("--seed", default=0, show_default=True)
@click.option("--name", default="soak", show_default=True, help="Of the JSON.")
@click.option("--ranks", default=1, show_default=True, help="Processes that share the model.")
@click.argument("server_flags", nargs=-1)
def main(
    model: Path | None, family: str, seconds: float, streams: int, seed: int, name: str,
    ranks: int, server_flags: tuple[str, ...],
) -> None:  # fmt: skip
    """Soaks a server; SERVER_FLAGS replace those that put it under pressure."""
    flags = list(server_flags) or PRESSURE.split()
    with checkpoint(model, family) as folder:
        with serving(["--model", str(folder), *flags]) as served:
            cases = asyncio.run(known_answers(served, seed))
        flags += ["--tp", str(ranks)]
        with serving(["--model", str(folder), *flags]) as served:
            assert served.log is not None
            ledger = asyncio.run(soak(served, cases, streams, seconds, seed))
            log = served.log.read_text()
    figures = figures_of(ledger, log)
    table = Table("figure", "value", title=f"{streams} streams, {seconds:g} s, {folder.name}")
    for key, value in figures.items():
        table.add_row(key, str(value))
    Console().print(table)
    print(
        save(
            name,
            {
                "family": family,
                "streams": streams,
                "seconds": seconds,
                "server_flags": flags,
                **figures,
            },
        )
    )
    if figures["wrong"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
