"""What the prefix cache saves, and what its tier in host memory adds and costs.

    python -m perf.bench_cache                       # Qwen3-0.6B with dummy weights, on a GPU
    python -m perf.bench_cache --tiny                # the same in small, on a CPU: a trial

All runs are of one engine each, without a server, greedy, EOS ignored, seeded.
- copies: bandwidth of pages that go out and in on their stream alone, and decode steps beside such
  copies against decode steps without.
- system prompt and turns: 64 clients take eight turns of 200 tokens in and 200 out, all after the
  same 2,048 tokens. Cache on and off.
- conversations: clients take turns; every prompt is all that was said before, and something new. A
  client speaks again once it was answered. With a pool that holds a tenth of what they come to:
  without a host tier, and with one, write-through and write-back. With plenty: cache on and off.
- shared prefix: clients with one long beginning in common, and a short end of their own. Cache on
  and off.

It ends after --seconds, and what setting up the last part takes beyond that: each part may take an
equal share of what is left, and is cut there (`is_cut`). The file is written anew after each part.
"""

import dataclasses
import json
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import click
import torch
from rich.console import Console
from rich.table import Table

from engine.config import EngineConfig
from perf.bench_decode_graph import SHAPES
from perf.cache_copies import measure_copies
from perf.cache_runs import Bench, Size
from perf.results import save
from perf.workloads import write_config

FULL: Final = Size(64, 8, 200, 200, 2048, 64, 200, 1 << 20)
TINY: Final = Size(4, 3, 20, 6, 64, 8, 5, 3)
_TURNS: Final = "system prompt and turns"
Part = tuple[str, Callable[[float], dict[str, Any]]]  # its name, and how it runs until a time


@click.command()
@click.option("--model", type=click.Choice(list(SHAPES)), default="0.6B", help="Shape of Qwen3.")
@click.option("--tiny", is_flag=True, help="A small model and small workloads, on a CPU.")
@click.option("--seconds", default=150.0, help="When to end, from the start of the first part.")
@click.option("--only", default="", help="Parts whose name has this in it.")
@click.option("--runs", default=1, show_default=True, help="Of each part.")
def main(model: str, tiny: bool, seconds: float, only: str, runs: int) -> None:
    size = TINY if tiny else FULL
    with tempfile.TemporaryDirectory() as folder:
        path = _write_tiny(Path(folder)) if tiny else write_config(Path(folder), model)
        config = EngineConfig(
            path,
            device="cpu" if tiny else "cuda",
            load_format="dummy",
            page_size=size.page_size,
            max_running=size.clients,
            max_model_len=size.context,
            max_kv_tokens=2 * size.conversation_tokens,
        )
        bench = Bench(config, size)
        figures = {
            "model": "tiny" if tiny else model,
            "device": str(bench.model.device),
            "size": dataclasses.asdict(size),
            "working_set_tokens": size.conversation_tokens,
            "seconds": seconds,
        }

        def keep(results: dict[str, Any]) -> None:
            if not tiny:
                save("bench_cache", {**figures, **results}, torch.cuda.get_device_name())

        parts = [part for part in parts_of(bench) if only in part[0]] * runs
        _show(measure(parts, seconds, keep))


def parts_of(bench: Bench) -> list[Part]:
    """What is measured, in the order of how much it would be missed."""
    size = bench.size
    tenth: dict[str, Any] = {"max_kv_tokens": max(size.conversation_tokens // 10, size.context)}
    pages = size.conversation_tokens // size.page_size
    # Pinning memory takes its time: so there is room for the conversations, and little more.
    host: dict[str, Any] = {**tenth, "host_cache_gib": 1.1 * pages * bench.page_bytes / 2**30}
    small = "conversations, a tenth of the pool"
    return [
        ("copies", lambda until_s: measure_copies(bench)),
        (_TURNS, partial(bench.conversations, after_system=True, cache="naive")),
        (_TURNS, partial(bench.conversations, after_system=True, cache="radix")),
        (small, partial(bench.conversations, **tenth)),
        (small, partial(bench.conversations, **host, host_cache_write="through")),
        ("conversations", partial(bench.conversations, cache="naive")),
        ("conversations", partial(bench.conversations, cache="radix")),
        ("shared prefix", partial(bench.shared_prefix, cache="naive")),
        ("shared prefix", partial(bench.shared_prefix, cache="radix")),
        (small, partial(bench.conversations, **host, host_cache_write="back")),
    ]


def measure(
    parts: list[Part], seconds: float, keep: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Each part's results by its name, and under `left_out` those there was no time for.

    keep  is called with all there is after each part
    """
    end_s = time.perf_counter() + seconds
    found: dict[str, Any] = {}
    left_out: list[str] = []
    for number, (name, run) in enumerate(parts):
        now_s = time.perf_counter()
        if now_s >= end_s:
            left_out.append(name)
            continue
        until_s = now_s + (end_s - now_s) / (len(parts) - number)
        found.setdefault(name, []).append(run(until_s))
        keep({"runs": found, "left_out": [name for name, _ in parts[number + 1 :]]})
    return {"runs": found, "left_out": left_out}


def _show(results: dict[str, Any]) -> None:
    console, names = Console(), ("ttft_p50_ms", "output_tokens_per_s", "cached_share",
                                 "from_host_share", "wall_s", "is_cut")  # fmt: skip
    for title, cells in results["runs"].items():
        if title == "copies":
            console.print(cells[0])
            continue
        table = Table("settings", *names, title=title)
        for cell in cells:
            label = " ".join(f"{name}={value}" for name, value in cell["settings"].items())
            table.add_row(label, *(str(_rounded(cell[name])) for name in names))
        console.print(table)
    if results["left_out"]:
        console.print(f"no time was left for: {', '.join(results['left_out'])}")


def _rounded(value: float | None) -> float | bool | None:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _write_tiny(folder: Path) -> Path:
    shape = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "intermediate_size": 128, "vocab_size": 512, "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "hidden_act": "silu", "dtype": "float32",
        "tie_word_embeddings": True, "eos_token_id": 1,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(shape))
    return folder


if __name__ == "__main__":
    main()
