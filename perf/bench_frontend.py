"""What HTTP, tokenizer and detokenizer carry: tokens a second over many streams, without a model.

    python -m perf.bench_frontend                  # 256 streams, HTTP/2 and HTTP/1.1, 10 ms a step
    python -m perf.bench_frontend --step-ms 0      # an engine that is never the bottleneck
    python -m perf.bench_frontend --client python --load-processes 8 --loops 1,2,4 \
        --streams 1024 --rounds 1 --step-ms 10 --name bench_frontend_loops

The server is perf.frontend_server. The load is C programs, h2load (nghttp2) over HTTP/2 and wrk
over HTTP/1.1, or processes of perf.stream_load, which need nothing beyond our own packages. Tokens
are whole answers of status 200 times the tokens that each was asked for. Before anything is timed
one answer is read and checked. The file is written anew after each number of loops.

loops      HTTP loops of the server
tokens/s   offered by the engine: streams / step; carried: what clients got
bytes      a token: fall where tokens of one stream are merged into one event
"""

import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import click
import httpx
import psutil
from rich.console import Console
from rich.table import Table

from perf.results import save
from perf.serving import Served, serving

C_PROGRAMS: Final = (("h2load", "nghttp2-client"), ("wrk", "wrk"))


@dataclass(frozen=True, slots=True)
class Plan:
    """What is asked of a server."""

    streams: int
    rounds: int  # answers of each stream
    tokens: int  # of an answer
    step_ms: float
    load_processes: int  # of perf.stream_load; 0: C programs


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


def run_own(url: str, body: Path, plan: Plan, *, http2: bool) -> Load:
    """`rounds` answers of each stream, shared out to processes; 4 HTTP/2 connections in each."""
    parts = urlsplit(url)
    streams = plan.streams // plan.load_processes
    command = [
        sys.executable, "-m", "perf.stream_load", str(parts.hostname), str(parts.port), str(body),
        "--streams", str(streams), "--answers", str(streams * plan.rounds),
        *(["--http2", "--each", str(max(1, streams // 4))] if http2 else []),
    ]  # fmt: skip
    loads = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        for _ in range(plan.load_processes)
    ]
    said = [load.communicate()[0] for load in loads]
    if any(load.returncode for load in loads):
        raise click.ClickException("a process of the load failed, see above")
    told = [json.loads(one) for one in said]
    return Load(
        sum(one["answers"] for one in told),
        sum(one["data_bytes"] for one in told),
        max(one["wall_s"] for one in told),
    )


def measure(served: Served, plan: Plan, *, http2: bool) -> dict[str, Any]:
    assert served.pid is not None
    process = psutil.Process(served.pid)
    with tempfile.TemporaryDirectory() as folder:
        body = Path(folder) / "body.json"
        body.write_text(json.dumps(body_of(plan.tokens)))
        cpu = process.cpu_times()
        if plan.load_processes:
            load = run_own(served.url, body, plan, http2=http2)
        elif http2:
            load = run_h2load(served.url, body, plan.streams, plan.rounds)
        else:
            duration_s = max(5.0, plan.rounds * plan.tokens * plan.step_ms / 1e3)
            load = run_wrk(served.url, body, plan.streams, duration_s)
        spent = process.cpu_times()
    made = load.answers * plan.tokens
    cpu_s = spent.user + spent.system - cpu.user - cpu.system
    return {
        "http": "2" if http2 else "1.1",
        "offered_tokens_per_s": None if not plan.step_ms else plan.streams / plan.step_ms * 1e3,
        "tokens_per_s": made / load.wall_s,
        "bytes_per_token": load.data_bytes / made,
        "server_cpu_us_per_token": cpu_s / made * 1e6,
        "server_cores": cpu_s / load.wall_s,
        "wall_s": load.wall_s,
    }


def show(results: list[dict[str, Any]]) -> None:
    table = Table(
        "loops", "HTTP", "run", "tokens/s", "offered", "bytes/token", "server µs/token", "cores"
    )
    for one in results:
        offered = one["offered_tokens_per_s"]
        table.add_row(
            str(one["loops"]), one["http"], str(one["run"]), f"{one['tokens_per_s']:,.0f}",
            "-" if offered is None else f"{offered:,.0f}", f"{one['bytes_per_token']:.0f}",
            f"{one['server_cpu_us_per_token']:.1f}", f"{one['server_cores']:.2f}",
        )  # fmt: skip
    Console().print(table)


@click.command()
@click.option("--loops", default="1", show_default=True, help="HTTP loops: 1,2,4 for each in turn.")
@click.option("--streams", default=256, show_default=True)
@click.option("--rounds", default=4, show_default=True, help="Answers of each stream.")
@click.option("--tokens", default=200, show_default=True, help="Of an answer.")
@click.option("--step-ms", default=10.0, show_default=True)
@click.option("--runs", default=3, show_default=True)
@click.option("--client", type=click.Choice(["c", "python"]), default="c", show_default=True)
@click.option("--load-processes", default=1, show_default=True, help="With --client python.")
@click.option("--name", default="bench_frontend", show_default=True, help="Of the JSON.")
def main(
    loops: str, streams: int, rounds: int, tokens: int, step_ms: float, runs: int, client: str,
    load_processes: int, name: str,
) -> None:  # fmt: skip
    """Measures what a server carries beside its model."""
    for program, package in C_PROGRAMS if client == "c" else ():
        if shutil.which(program) is None:
            raise click.ClickException(
                f"{program} is missing: Debian has it in {package}; or use --client python"
            )
    if streams % (4 * load_processes):
        raise click.ClickException(f"--streams must be a multiple of {4 * load_processes}")
    plan = Plan(streams, rounds, tokens, step_ms, load_processes if client == "python" else 0)
    results: list[dict[str, Any]] = []
    events: dict[int, float] = {}
    for number in map(int, loops.split(",")):
        flags = ["--step-ms", str(step_ms), "--http-loops", str(number)]
        with serving([*flags, "--max-running", str(streams)], "perf.frontend_server") as served:
            events[number] = check(served.url, tokens)
            for run in range(runs):
                for http2 in (True, False):
                    one = measure(served, plan, http2=http2)
                    results.append({"loops": number, "run": run, **one})
        show(results)
        print(save(name, {
            "streams": streams, "rounds": rounds, "tokens": tokens, "step_ms": step_ms,
            "client": client, "load_processes": load_processes, "events_per_token_alone": events,
            "results": results,
        }))  # fmt: skip


if __name__ == "__main__":
    main()
