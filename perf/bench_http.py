"""The offline workload over HTTP, against the engine alone: what the server around it costs.

    python -m perf.bench_step                                  # the engine alone, first
    python -m perf.bench_http --tokenizer FOLDER [--model 0.6B] [--http 2] [--runs 3]

Starts a server with random weights of the model's shapes and FOLDER's tokenizer, and sends the
workload's 256 prompts at once as streams, from threads of this process. Prompts differ from run to
run, so that the prefix cache does not help. The share is of the tokens a second in
perf/results/bench_step_MODEL.json, which the same machine should have made just before.
"""

import json
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any, Final, Literal

import click
from rich.console import Console

from client.bench.figures import summarise
from client.bench.load import Asking
from client.bench.runner import Pace, run_load
from client.bench.workload import Sampling, Session, Turn
from client.target import Target
from perf.results import FOLDER, save
from perf.serving import serving
from perf.workloads import offline_seed_0, write_config

_IDS: Final = 10_001  # prompts have ids below this
_TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer_config.json")


def sessions(run: int) -> list[Session]:
    load = offline_seed_0()
    return [
        Session((Turn(tuple((token + 7 * run) % _IDS for token in prompt), new),))
        for prompt, new in zip(load.prompts, load.new_tokens, strict=True)
    ]


def offline_tokens_per_s(model: str) -> float | None:
    path = FOLDER / f"bench_step_{model}.json"
    if not path.is_file():
        return None
    rate: float = json.loads(path.read_text())["figures"]["tokens_per_s"]
    return rate


@click.command()
@click.option("--model", default="0.6B", show_default=True)
@click.option("--tokenizer", type=click.Path(exists=True, path_type=Path), required=True)
@click.option("--http", type=click.Choice(["1", "2"]), default="2", show_default=True)
@click.option("--runs", default=3, show_default=True)
@click.option("--threads", default=4, show_default=True, help="Of the load.")
@click.argument("server_flags", nargs=-1)
def main(
    model: str, tokenizer: Path, http: Literal["1", "2"], runs: int, threads: int,
    server_flags: tuple[str, ...],
) -> None:  # fmt: skip
    console, results = Console(), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as name:
        folder = write_config(Path(name) / model, model)
        for file in _TOKENIZER_FILES:
            shutil.copy(tokenizer / file, folder / file)
        flags = [
            "--model", str(folder), "--device", "cuda", "--load-format", "dummy",
            "--max-running", "256", "--max-model-len", "4096", "--prefill-budget", "16384",
            "--target-itl-ms", "0", *server_flags,
        ]  # fmt: skip
        with serving(flags) as served:
            target = Target(served.url, served.model, http2=http == "2")
            asking = Asking(target, Sampling(chat=False, temperature=0.6))
            for run in range(runs):
                pace = Pace(concurrency=256, threads=threads)
                figures = summarise(
                    run_load(asking, sessions(run), pace, console, f"run {run}").samples
                )
                if figures["failed"]:
                    raise click.ClickException(f"requests failed: {figures['errors']}")
                results.append(figures)
                console.print({k: figures[k] for k in ("output_tokens_per_s", "ttft_ms", "itl_ms")})
    rate = statistics.median(result["output_tokens_per_s"] for result in results)
    alone = offline_tokens_per_s(model)
    share = None if alone is None else rate / alone
    print(f"{rate:.0f} tokens/s over HTTP/{http}; the engine alone {alone}; share {share}")
    figures = {
        "model": model, "http": http, "threads": threads, "server_flags": list(server_flags),
        "tokens_per_s": rate, "offline_tokens_per_s": alone, "share": share, "runs": results,
    }  # fmt: skip
    print(save(f"bench_http{http}_{model}", figures))


if __name__ == "__main__":
    main()
