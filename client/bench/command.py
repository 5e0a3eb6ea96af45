"""`plait bench`: measures a server by its answers, and compares results.

plait bench --url http://127.0.0.1:8000 --concurrency 16 --json a.json
plait bench --rate 2-20 --dataset shared-prefix --ttft-ms 500 --itl-ms 50
plait bench --compare a.json --compare b.json --plots FOLDER
"""

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from client.bench.figures import Targets, distributions, summarise
from client.bench.load import Asking
from client.bench.options import DATASETS, RATE, TOKENS, Workload
from client.bench.own_times import means_ms, read_totals, told
from client.bench.plots import NoMatplotlib, draw
from client.bench.record import NoRecord, read_record, write_record
from client.bench.runner import Pace, Ran, run_load
from client.bench.strain import Strain, threads_for
from client.bench.tables import markdown_of, tables_of
from client.bench.workload import Sampling
from client.target import NoServer, Target, ask_json, key_of_environment, model_of, root_of

_PATH = click.Path(path_type=Path)
_URL = "http://127.0.0.1:8000"
_CHARACTERS_A_TOKEN = 4  # of English, about: for lengths of a workload, never for figures


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """What one run is told besides its workload."""

    asking: Asking
    pace: Pace
    targets: Targets
    warmup: int
    label: str


@click.command()
@click.option("--url", default=_URL, show_default=True,
              help="Any OpenAI-compatible server.  [its key: environment variable PLAIT_API_KEY "
              "or OPENAI_API_KEY]")  # fmt: skip
@click.option("--model", help="What to ask for; without it, the server's first.")
@click.option("--http", type=click.Choice(["1", "2"]), default="1", show_default=True,
              help="2: all requests of a thread over one connection.")  # fmt: skip
@click.option("--api", type=click.Choice(["completions", "chat"]), help="Where texts go; ids go to "
              "completions.  [default: chat for files, else completions]")  # fmt: skip
@click.option("--prompts", type=click.Choice(["ids", "text"]),
              help="Prompts that are made up: token ids, or as many words.  [default: ids, unless "
              "--api chat]")  # fmt: skip
@click.option("--dataset", type=click.Choice(DATASETS), default="random", show_default=True)
@click.option("--file", type=_PATH, help="Of sharegpt, agents and trace: JSON, or JSON Lines.")
@click.option("--requests", type=click.IntRange(1), default=64, show_default=True,
              help="Sessions, where they have several turns; of a trace, at most.")  # fmt: skip
@click.option("--input-tokens", type=TOKENS, default="64", show_default=True,
              help="Prompts; with shared-prefix, what follows the prefix.")  # fmt: skip
@click.option("--output-tokens", type=TOKENS, default="32", show_default=True)
@click.option("--prefix-tokens", type=click.IntRange(1), default=512, show_default=True)
@click.option("--groups", type=click.IntRange(1), default=8, show_default=True,
              help="Different prefixes.")  # fmt: skip
@click.option("--vocab", type=click.IntRange(2), default=1000, show_default=True,
              help="Random ids are below this.")  # fmt: skip
@click.option("--concurrency", type=click.IntRange(1), default=16, show_default=True,
              help="Closed loop: sessions at a time.")  # fmt: skip
@click.option("--ramp-up-s", type=click.FloatRange(0), default=0.0, show_default=True,
              help="Closed loop: time until all of them have begun.")  # fmt: skip
@click.option("--rate", type=RATE, help="Open loop instead: sessions a second, a Poisson process; "
              "2-20 rises from 2 to 20.")  # fmt: skip
@click.option("--speed", type=click.FloatRange(0, min_open=True), default=1.0, show_default=True,
              help="A trace's clock.")  # fmt: skip
@click.option("--threads", type=click.IntRange(1),
              help="Of the load; each has a loop.  [default: one for 32 sessions at a time, and at "
              "most half of the processors]")  # fmt: skip
@click.option("--warmup", type=click.IntRange(0), default=2, show_default=True,
              help="Sessions before anything counts.")  # fmt: skip
@click.option("--seed", default=0, show_default=True)
@click.option("--temperature", type=click.FloatRange(0), default=0.0, show_default=True)
@click.option("--ignore-eos/--no-ignore-eos", default=True, show_default=True,
              help="Outputs are exactly as long as asked for; not every server can.")  # fmt: skip
@click.option("--tokenizer", type=_PATH, help="A checkpoint's folder or tokenizer.json: counts "
              "tokens where the server sends no usage.")  # fmt: skip
@click.option("--timeout-s", type=click.FloatRange(0, min_open=True), help="Of one answer.")
@click.option("--ttft-ms", type=click.FloatRange(0, min_open=True), help="Target for goodput.")
@click.option("--itl-ms", type=click.FloatRange(0, min_open=True),
              help="Target for goodput, of a request's mean time between tokens.")  # fmt: skip
@click.option("--label", help="What to call the run.  [default: the model]")
@click.option("--json", "json_out", type=_PATH, help="Write the result here.")
@click.option("--compare", type=_PATH, multiple=True,
              help="Send nothing: put this result beside others; repeat.")  # fmt: skip
@click.option("--plots", type=_PATH, help="With --compare or alone: a folder for PNG files; needs "
              "matplotlib.")  # fmt: skip
def bench(compare: tuple[Path, ...], plots: Path | None, json_out: Path | None,
          **flags: Any) -> None:  # fmt: skip
    """Measures any OpenAI-compatible server by its answers; exits with 1 where a request failed."""
    if compare:
        _compare(compare, plots)
        return
    workload = _workload_of(flags)
    count = _counter(flags["tokenizer"])
    run = _run_of(flags, workload, count)
    ran, own_ms = _measure(run, workload, count or _estimate)
    record = _report(run, workload, ran, own_ms, json_out)
    if plots is not None:
        _draw([record], plots)
    if record["figures"]["failed"]:
        sys.exit(1)


def _workload_of(flags: dict[str, Any]) -> Workload:
    names = {field.name for field in dataclasses.fields(Workload)}
    as_ids = flags["prompts"] == "ids" or (flags["prompts"] is None and flags["api"] != "chat")
    workload = Workload(as_ids=as_ids, **{k: v for k, v in flags.items() if k in names})
    workload.check()
    if as_ids and flags["api"] == "chat":
        raise click.UsageError("chat completions take no ids: --prompts text")
    return workload


def _run_of(flags: dict[str, Any], workload: Workload, count: Callable[[str], int] | None) -> Run:
    url, key = root_of(flags["url"]), key_of_environment()
    try:
        model = flags["model"] or model_of(url, key)
    except NoServer as error:
        hint = "" if flags["url"] != _URL else "; `plait serve` starts one, --url names another"
        raise click.ClickException(f"{error}{hint}") from error
    from_file = workload.dataset in ("sharegpt", "agents")
    chat = flags["api"] == "chat" or (flags["api"] is None and from_file)
    sampling = Sampling(chat, flags["ignore_eos"], flags["temperature"])
    target = Target(url, model, flags["http"] == "2", key)
    at_a_time = None if workload.is_timed else flags["concurrency"]
    threads = flags["threads"] or threads_for(at_a_time or workload.requests)
    return Run(
        Asking(target, sampling, count, flags["timeout_s"]),
        Pace(at_a_time, threads, flags["ramp_up_s"]),
        Targets(flags["ttft_ms"], flags["itl_ms"]),
        flags["warmup"],
        flags["label"] or model,
    )


def _measure(
    run: Run, workload: Workload, count: Callable[[str], int]
) -> tuple[Ran, dict[str, float]]:
    """What came, and the server's own means of it.

    Raises click.ClickException where the warm-up fails: nothing would be worth timing.
    """
    console = Console(stderr=True)
    sessions = workload.sessions(count)
    if run.warmup:
        first = workload.warm_up(run.warmup).sessions(count)
        warm = run_load(run.asking, first, Pace(1), console, "warm-up")
        wrong = next((sample.error for sample in warm.samples if sample.error), None)
        if wrong is not None:
            raise click.ClickException(f"nothing was timed, since the warm-up failed: {wrong}")
    before = read_totals(run.asking.target)
    ran = run_load(run.asking, sessions, run.pace, console, "requests")
    return ran, means_ms(before, read_totals(run.asking.target))


def _report(
    run: Run, workload: Workload, ran: Ran, own_ms: dict[str, float], json_out: Path | None
) -> dict[str, Any]:
    figures = summarise(ran.samples, run.targets)
    target = run.asking.target
    Console().print(tables_of(figures, f"{run.label} at {target.url}, HTTP/{1 + target.http2}"))
    if own_ms:
        click.echo(told(own_ms))
    _tell(ran.strain)
    record: dict[str, Any] = {
        "label": run.label,
        "server": {"url": target.url, "model": target.model, "http": 1 + target.http2,
                   "version": _version_of(target), "own_means_ms": own_ms},
        "workload": {**dataclasses.asdict(workload), "file": workload.file and workload.file.name,
                     "concurrency": run.pace.concurrency, "ramp_up_s": run.pace.ramp_up_s,
                     **dataclasses.asdict(run.asking.sampling)},
        "client": dataclasses.asdict(ran.strain),
        "figures": figures,
        "distributions": distributions(ran.samples),
    }  # fmt: skip
    if json_out is not None:
        write_record(json_out, samples=ran.samples, **record)
        click.echo(json_out)
    return record


def _tell(strain: Strain) -> None:
    """Whether the figures are the server's."""
    click.echo(strain)
    if strain.is_too_much:
        click.echo(
            "warning: the load itself could not keep up, so that these times are not the server's "
            "alone: more --threads, or another machine for it", err=True,
        )  # fmt: skip


def _version_of(target: Target) -> str | None:
    """What the server says that it is, where it says so."""
    try:
        told = ask_json(target.url, "/version", target.key)
    except NoServer:
        return None
    return str(told.get("version")) if isinstance(told, dict) else None


def _estimate(text: str) -> int:
    return max(1, len(text) // _CHARACTERS_A_TOKEN)


def _counter(tokenizer: Path | None) -> Callable[[str], int] | None:
    if tokenizer is None:
        return None
    from tokenizers import Tokenizer  # a second, and wanted by few runs

    file = tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer
    try:
        loaded = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing more precise
        raise click.UsageError(f"--tokenizer {tokenizer} cannot be read: {error}") from error
    return lambda text: len(loaded.encode(text, add_special_tokens=False).ids)


def _compare(paths: tuple[Path, ...], plots: Path | None) -> None:
    try:
        records = [read_record(path) for path in paths]
    except NoRecord as error:
        raise click.UsageError(str(error)) from error
    if len({record["label"] for record in records}) < len(records):
        records = [
            record | {"label": f"{record['label']} ({path})"}
            for record, path in zip(records, paths, strict=True)
        ]
    click.echo(markdown_of(records))
    if any(record["workload"] != records[0]["workload"] for record in records):
        click.echo("warning: these runs were not of the same workload", err=True)
    if plots is not None:
        _draw(records, plots)


def _draw(records: list[dict[str, Any]], folder: Path) -> None:
    try:
        for path in draw(records, folder):
            click.echo(path)
    except NoMatplotlib as error:
        raise click.ClickException(str(error)) from error
