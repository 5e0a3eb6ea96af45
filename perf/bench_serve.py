"""A server under load, measured by its clients: throughput, TTFT, ITL.

    python -m perf.bench_serve --requests 64 --concurrency 16 -- --model FOLDER --page-size 16
    python -m perf.bench_serve --http 2 --rate 4          # Poisson arrivals, one HTTP/2 connection
    python -m perf.bench_serve --url http://host:8000     # any OpenAI-compatible server

Starts a server of this checkout with the flags after `--`, or takes the one at --url; the load
comes from this process. Before anything is timed, answers are checked: as many tokens as asked for,
the same streamed and whole.

throughput  output tokens, by usage, over the time from the first request to the last answer's end
TTFT        from before the request is sent (or from its planned time) to its first text
ITL         between arrivals of text; TPOT is the mean per token, by usage, of one request
"""

import asyncio
import time
from collections import Counter
from contextlib import nullcontext
from typing import Any, Literal

import click
import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from perf.load import LoadThread, Planned, Sample, Target, ask, body_of, make_plan, new_client
from perf.results import save
from perf.serving import Served, model_of, serving

PERCENTILES = (50, 90, 99)


class Range(click.ParamType[tuple[int, int]]):
    """`128`, or `100-1024` with both ends included."""

    name = "N|LOW-HIGH"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value
        try:
            low, _, high = str(value).partition("-")
            found = int(low), int(high or low)
        except ValueError:
            self.fail(f"{value!r} is neither a number nor LOW-HIGH", param, ctx)
        if not 1 <= found[0] <= found[1]:
            self.fail(f"{value!r}: it must be at least 1, and LOW at most HIGH", param, ctx)
        return found


async def check(target: Target, plan: list[Planned]) -> None:
    """Raises ClickException where an answer is not what was asked for."""
    async with new_client(target) as client:
        for planned in plan:
            streamed = await ask(client, target, planned, time.perf_counter())
            if streamed.error is not None:
                raise click.ClickException(f"not timed, an answer is wrong: {streamed.error}")
            body = body_of(target, planned, stream=False, stream_options=None)
            whole = (await client.post("/v1/completions", json=body)).json()
            if whole["choices"][0]["text"] != streamed.text:
                raise click.ClickException("not timed: streamed and whole answers differ")
            if whole["usage"]["completion_tokens"] != streamed.output_tokens:
                raise click.ClickException("not timed: streamed and whole usage differ")


def run_load(
    target: Target, plan: list[Planned], concurrency: int | None, threads: int
) -> list[Sample]:
    """Sends the plan, a part of it from each thread."""
    loads = [
        LoadThread(
            target, plan[k::threads],
            None if concurrency is None else len(range(k, concurrency, threads)),
        )
        for k in range(threads)
    ]  # fmt: skip
    start_s = time.perf_counter() + 0.1
    running = [load.start(start_s) for load in loads]
    with Progress() as progress:
        bar = progress.add_task("requests", total=len(plan))
        while any(thread.is_alive() for thread in running):
            progress.update(bar, completed=sum(len(load.samples) for load in loads))
            time.sleep(0.1)
        progress.update(bar, completed=sum(len(load.samples) for load in loads))
    for load in loads:
        if load.failure is not None:
            raise load.failure
    return [sample for load in loads for sample in load.samples]


def percentiles_ms(values_s: list[float]) -> dict[str, float]:
    if not values_s:
        return {}
    found = np.percentile(np.array(values_s) * 1e3, PERCENTILES)
    return {f"p{p}": float(v) for p, v in zip(PERCENTILES, found, strict=True)}


def summarise(samples: list[Sample]) -> dict[str, Any]:
    """The figures of one run."""
    good = [sample for sample in samples if sample.error is None]
    wall_s = max(s.ended_s for s in samples) - min(s.sent_s for s in samples)
    output = sum(sample.output_tokens for sample in good)
    prompt = sum(len(sample.planned.prompt_ids) for sample in good)
    spans = [
        (s, s.arrivals_s[-1] - s.arrivals_s[0])
        for s in good
        if s.output_tokens > 1 and s.arrivals_s
    ]
    return {
        "requests": len(samples),
        "errors": dict(Counter(s.error for s in samples if s.error is not None)),
        "wall_s": wall_s,
        "output_tokens": output,
        "input_tokens": prompt,
        "output_tokens_per_s": output / wall_s,
        "requests_per_s": len(good) / wall_s,
        "ttft_ms": percentiles_ms([s.arrivals_s[0] - s.sent_s for s in good if s.arrivals_s]),
        "itl_ms": percentiles_ms([gap for s in good for gap in np.diff(s.arrivals_s).tolist()]),
        "tpot_ms": percentiles_ms([span / (s.output_tokens - 1) for s, span in spans]),
        "latency_ms": percentiles_ms([s.ended_s - s.sent_s for s in good]),
    }


def show(figures: dict[str, Any], title: str) -> None:
    table = Table("figure", "value", title=title)
    for name, value in figures.items():
        if isinstance(value, dict):
            value = "  ".join(f"{key} {each:.4g}" for key, each in value.items()) or "none"
        table.add_row(name, value if isinstance(value, str) else f"{value:,.4g}")
    Console().print(table)


@click.command()
@click.option("--url", help="A server that runs; without it, one is started.")
@click.option("--http", type=click.Choice(["1", "2"]), default="1", show_default=True)
@click.option("--requests", default=64, show_default=True)
@click.option("--concurrency", default=16, show_default=True, help="Closed loop: at a time.")
@click.option("--rate", type=float, help="Open loop instead: requests a second, Poisson.")
@click.option("--input-tokens", type=Range(), default="64", show_default=True)
@click.option("--output-tokens", type=Range(), default="32", show_default=True)
@click.option("--vocab", default=1000, show_default=True, help="Prompts have ids below this.")
@click.option("--seed", default=0, show_default=True)
@click.option("--threads", default=1, show_default=True, help="Of the load; each has a loop.")
@click.option("--name", default="bench_serve", show_default=True, help="Of the JSON.")
@click.argument("server_flags", nargs=-1)
def main(
    url: str | None, http: Literal["1", "2"], requests: int, concurrency: int, rate: float | None,
    input_tokens: tuple[int, int], output_tokens: tuple[int, int], vocab: int, seed: int,
    threads: int, name: str, server_flags: tuple[str, ...],
) -> None:  # fmt: skip
    """Measures a server; SERVER_FLAGS go to the one that is started."""
    plan = make_plan(
        seed, requests, vocab=vocab, input_tokens=input_tokens, output_tokens=output_tokens,
        rate=rate,
    )  # fmt: skip
    there = None if url is None else Served(url, model_of(url), None, None)
    with nullcontext(there) if there is not None else serving(server_flags) as served:
        target = Target(served.url, served.model, http2=http == "2")
        first = make_plan(
            seed + 1, 2, vocab=vocab, input_tokens=input_tokens, output_tokens=output_tokens,
            rate=None,
        )  # fmt: skip
        asyncio.run(check(target, first))  # warms up, too
        samples = run_load(target, plan, None if rate else concurrency, threads)
    figures = {
        "model": target.model, "http": http, "concurrency": None if rate else concurrency,
        "rate": rate, "load_threads": threads, "server_flags": list(server_flags),
        **summarise(samples),
    }  # fmt: skip
    show(summarise(samples), f"{target.model}, HTTP/{http}, " + (
        f"{rate:g} requests/s" if rate else f"{concurrency} at a time"))  # fmt: skip
    print(save(name, figures))
    if figures["errors"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
