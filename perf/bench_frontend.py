"""What HTTP, tokenizer and detokenizer carry: tokens a second over many streams, without a model.

    python -m perf.bench_frontend                  # 256 streams, HTTP/2 and HTTP/1.1, 10 ms a step
    python -m perf.bench_frontend --step-ms 0      # an engine that is never the bottleneck

The server is perf.frontend_server; the load is C programs: h2load (nghttp2) over HTTP/2, wrk over
HTTP/1.1. Tokens are whole answers of status 200 times the tokens that each was asked for. Before
anything is timed one answer is read and checked.

tokens/s   offered by the engine: streams / step; carried: what clients got
bytes      a token: fall where tokens of one stream are merged into one event
"""

import json
import re
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import httpx
import psutil
from rich.console import Console
from rich.table import Table

from perf.results import save
from perf.serving import Served, serving


@dataclass(frozen=True, slots=True)
class Load:
    """What came of a load."""

    answers: int  # whole ones, of status 200
    data_bytes: int
    wall_s: float


def body_of(tokens: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Tell me something. " * 20}]
    return {"model": "replay", "messages": messages, "max_tokens": tokens, "stream": True}


def check(url: str, tokens: int) -> float:
    """Events a token of an unloaded stream. Raises ClickException where an answer is wrong."""
    body = {**body_of(tokens), "stream_options": {"include_usage": True}}
    response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    *events, done, rest = response.text.split("\n\n")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    if done != "data: [DONE]" or rest or chunks[-1]["usage"]["completion_tokens"] != tokens:
        raise click.ClickException(f"not timed, an answer is wrong: {response.text[-300:]}")
    return len(chunks) / tokens


def run_h2load(url: str, body: Path, streams: int, rounds: int) -> Load:
    """`rounds` answers of each stream over 4 HTTP/2 connections."""
    command = [
        "h2load", "-n", str(streams * rounds), "-c", "4", "-m", str(streams // 4), "-t", "1",
        "-d", str(body), "-H", "content-type: application/json", f"{url}/v1/chat/completions",
    ]  # fmt: skip
    begun = time.monotonic()
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    wall_s = time.monotonic() - begun
    found = re.search(r"(\d+) succeeded, (\d+) failed, (\d+) errored", said)
    data = re.search(r"\((\d+)\) data", said)
    if found is None or data is None or int(found[1]) != streams * rounds:
        raise click.ClickException(f"h2load:\n{said}")
    return Load(streams * rounds, int(data[1]), wall_s)


def run_wrk(url: str, body: Path, streams: int, duration_s: float) -> Load:
    """Answers over as many HTTP/1.1 connections; those that are not whole at the end are lost."""
    script = body.with_suffix(".lua")
    script.write_text(
        f'wrk.method = "POST"\nwrk.body = io.open("{body}"):read("*a")\n'
        'wrk.headers["content-type"] = "application/json"\n'
    )
    command = [
        "wrk", "-t", "1", "-c", str(streams), "-d", f"{duration_s:.0f}s", "--timeout", "60s",
        "-s", str(script), f"{url}/v1/chat/completions",
    ]  # fmt: skip
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"(\d+) requests in ([\d.]+)s, ([\d.]+)(\w+) read", said)
    if found is None or "Non-2xx" in said or "Socket errors" in said:
        raise click.ClickException(f"wrk:\n{said}")
    unit = {"KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30}[found[4]]
    return Load(int(found[1]), int(float(found[3]) * unit), float(found[2]))


def measure(
    served: Served, *, http2: bool, streams: int, rounds: int, tokens: int, step_ms: float
) -> dict[str, Any]:
    assert served.pid is not None
    process = psutil.Process(served.pid)
    with tempfile.TemporaryDirectory() as folder:
        body = Path(folder) / "body.json"
        body.write_text(json.dumps(body_of(tokens)))
        cpu = process.cpu_times()
        if http2:
            load = run_h2load(served.url, body, streams, rounds)
        else:
            load = run_wrk(served.url, body, streams, max(5.0, rounds * tokens * step_ms / 1e3))
        spent = process.cpu_times()
    made = load.answers * tokens
    return {
        "http": "2" if http2 else "1.1",
        "streams": streams,
        "offered_tokens_per_s": None if not step_ms else streams / step_ms * 1e3,
        "tokens_per_s": made / load.wall_s,
        "bytes_per_token": load.data_bytes / made,
        "server_cpu_us_per_token": (spent.user + spent.system - cpu.user - cpu.system) / made * 1e6,
        "wall_s": load.wall_s,
    }


@click.command()
@click.option("--streams", default=256, show_default=True)
@click.option("--rounds", default=4, show_default=True, help="Answers of each stream.")
@click.option("--tokens", default=200, show_default=True, help="Of an answer.")
@click.option("--step-ms", default=10.0, show_default=True)
@click.option("--runs", default=3, show_default=True)
@click.option("--name", default="bench_frontend", show_default=True, help="Of the JSON.")
def main(streams: int, rounds: int, tokens: int, step_ms: float, runs: int, name: str) -> None:
    """Measures what a server carries beside its model."""
    for program, package in (("h2load", "nghttp2-client"), ("wrk", "wrk")):
        if shutil.which(program) is None:
            raise click.ClickException(f"{program} is missing: Debian has it in {package}")
    results = []
    with serving(["--step-ms", str(step_ms)], "perf.frontend_server") as served:
        events = check(served.url, tokens)
        for run in range(runs):
            for http2 in (True, False):
                one = measure(
                    served, http2=http2, streams=streams, rounds=rounds, tokens=tokens,
                    step_ms=step_ms,
                )  # fmt: skip
                results.append({"run": run, **one})
    table = Table("HTTP", "run", "tokens/s", "offered", "bytes/token", "server µs/token")
    for one in results:
        offered = one["offered_tokens_per_s"]
        table.add_row(
            one["http"], str(one["run"]), f"{one['tokens_per_s']:,.0f}",
            "-" if offered is None else f"{offered:,.0f}", f"{one['bytes_per_token']:.0f}",
            f"{one['server_cpu_us_per_token']:.1f}",
        )  # fmt: skip
    Console().print(table)
    print(save(name, {"step_ms": step_ms, "events_per_token_alone": events, "results": results}))


if __name__ == "__main__":
    main()
