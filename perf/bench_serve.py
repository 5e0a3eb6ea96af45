"""A server of this checkout under the load of `plait bench`, and its figures among the others.

    python -m perf.bench_serve --requests 64 --concurrency 16 -- --model FOLDER --page-size 16
    python -m perf.bench_serve --http 2 --rate 4          # Poisson arrivals, one HTTP/2 connection

Starts a server with the flags after `--`; those before are `plait bench`'s, and --name is that of
the JSON. Before anything is timed, answers are checked: as many tokens as asked for, the same
streamed and whole.
"""

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import httpx

from client.bench.command import bench
from client.events import EventReader, text_of
from perf.results import save
from perf.serving import Served, serving


def check(served: Served) -> None:
    """Raises ClickException where a streamed and a whole answer differ."""
    body: dict[str, Any] = {
        "model": served.model, "prompt": list(range(3, 67)), "max_tokens": 32, "temperature": 0,
        "ignore_eos": True,
    }  # fmt: skip
    streaming = {**body, "stream": True, "stream_options": {"include_usage": True}}
    url = f"{served.url}/v1/completions"
    whole = httpx.post(url, json=body, timeout=300).raise_for_status().json()
    streamed = httpx.post(url, json=streaming, timeout=300).raise_for_status().content
    chunks = EventReader().feed(streamed)
    if "".join(text_of(chunk) for chunk in chunks) != whole["choices"][0]["text"]:
        raise click.ClickException("not timed: streamed and whole answers differ")
    if not chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == 32:
        raise click.ClickException("not timed: streamed and whole usage differ, or are not 32")


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """What goes to `plait bench`, and what to the server."""
    words = list(arguments)
    at = words.index("--") if "--" in words else len(words)
    return words[:at], words[at + 1 :]


@click.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
@click.option("--name", default="bench_serve", show_default=True, help="Of the JSON.")
@click.pass_context
def main(context: click.Context, name: str) -> None:
    """Measures a server of this checkout; see `plait bench --help` for the load's options."""
    load_flags, server_flags = context.args, context.obj
    with tempfile.TemporaryDirectory(prefix="plait-") as folder:
        made = Path(folder) / "result.json"
        with serving(server_flags) as served:
            check(served)
            code = _measure([*load_flags, "--url", served.url, "--json", str(made)])
        record = json.loads(made.read_text())
    figures = {"server_flags": server_flags, "workload": record["workload"], **record["figures"]}
    print(save(name, figures))
    sys.exit(code)


def _measure(arguments: list[str]) -> int:
    """The exit code of `plait bench`."""
    try:
        bench.main(arguments, prog_name="plait bench", standalone_mode=False)
    except SystemExit as end:
        return int(end.code or 0)
    return 0


if __name__ == "__main__":
    for_load, for_server = split(sys.argv[1:])
    main(for_load, obj=for_server)
