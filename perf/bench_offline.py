"""Throughput without a server: one stream, many streams, transformers, and the seed-0 workload.

    python -m perf.bench_offline                    # SmolLM2 in float32 on the CPU
    python -m perf.bench_offline --requests 256 --scale 1 --max-running 256   # the public size

The seed-0 workload is Mini-SGLang's and nano-vllm's: `random.seed(0)`, prompts of 100 to 1,024
random ids, outputs of 100 to 1,024 tokens, temperature 0.6, EOS ignored, all submitted at once.
`--scale` divides the lengths, for machines without a GPU. Single streams run in pairs with
transformers' `generate` (same dtype, threads and prompt), alternating, so that drift hits both.
Output is checked before anything is timed: greedy ids must be equal to transformers'.
"""

import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
import transformers
from rich.console import Console
from rich.progress import track
from rich.table import Table

from engine.build import build_engine
from engine.config import EngineConfig
from engine.core import Engine
from engine.request import Request, SamplingParams
from perf.results import save
from runtime.setup.model import default_folder

CONTEXT = 40  # prompt tokens of the single streams


class Bench:
    """An engine and the peer, on the same weights."""

    def __init__(self, config: EngineConfig) -> None:
        self.engine: Engine = build_engine(config)
        dtype = getattr(torch, self.engine.facts.dtype)
        self.peer = transformers.AutoModelForCausalLM.from_pretrained(config.model, dtype=dtype)
        self.peer.eval()
        self._ids = 0

    def run(self, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
        """All at once, to the end; the output ids."""
        first = self._ids
        self._ids += len(prompts)
        outputs: list[list[int]] = [[] for _ in prompts]
        for index, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
            ids = np.array(prompt, np.int32)
            self.engine.submit(Request(first + index, ids, one, seed=index))
        while self.engine.has_work:
            output = self.engine.step()
            if output is not None:
                for request_id, token in zip(output.request_ids, output.token_ids, strict=True):
                    outputs[int(request_id) - first].append(int(token))
        return outputs

    def greedy(self, prompts: list[list[int]], new: int) -> list[list[int]]:
        params = SamplingParams(max_new_tokens=new, temperature=0.0, ignore_eos=True)
        return self.run(prompts, [params] * len(prompts))

    @torch.inference_mode()
    def peer_greedy(self, prompt: list[int], new: int) -> list[int]:
        ids = torch.tensor([prompt])
        out = self.peer.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=new,
            max_new_tokens=new, pad_token_id=0,
        )  # fmt: skip
        result: list[int] = out[0, len(prompt) :].tolist()
        return result


def timed(call: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def streams(bench: Bench, runs: int, new: int) -> dict[str, Any]:
    """One stream against transformers, and 16 streams against one. Tokens per second."""
    rng = random.Random(1)
    vocab = min(10_000, bench.engine.facts.vocab_size)

    def fresh() -> list[int]:
        return [rng.randrange(vocab) for _ in range(CONTEXT)]

    prompt = fresh()
    # transformers suppresses EOS to reach `new`: this prompt's greedy output must have none.
    assert bench.greedy([prompt], 16)[0] == bench.peer_greedy(prompt, 16), "ids differ: not timed"
    rates: dict[str, list[float]] = {"one": [], "transformers": [], "sixteen": []}
    for _ in track(range(runs), "streams"):
        one, many = fresh(), [fresh() for _ in range(16)]
        rates["one"].append(new / timed(partial(bench.greedy, [one], new)))
        rates["transformers"].append(new / timed(partial(bench.peer_greedy, one, new)))
        rates["sixteen"].append(16 * new / timed(partial(bench.greedy, many, new)))
    median = {name: statistics.median(values) for name, values in rates.items()}
    pairs = zip(rates["one"], rates["transformers"], strict=True)
    return {
        "tokens_per_s": median,
        "all": rates,
        "one_over_transformers": statistics.median(a / b for a, b in pairs),
        "sixteen_over_one": statistics.median(
            a / b for a, b in zip(rates["sixteen"], rates["one"], strict=True)
        ),
    }


def seed_0(bench: Bench, requests: int, scale: int) -> dict[str, Any]:
    """The public workload. Output tokens per second of wall time, and host time a step."""
    rng = random.Random(0)
    vocab = min(10_000, bench.engine.facts.vocab_size)
    low, high = 100 // scale, 1024 // scale
    prompts = [
        [rng.randint(0, vocab - 1) for _ in range(rng.randint(low, high))] for _ in range(requests)
    ]
    lengths = [rng.randint(low, high) for _ in range(requests)]
    params = [SamplingParams(max_new_tokens=n, temperature=0.6, ignore_eos=True) for n in lengths]
    before = bench.engine.stats()
    begun = time.perf_counter()
    outputs = bench.run(prompts, params)
    wall_s = time.perf_counter() - begun
    after = bench.engine.stats()
    assert [len(output) for output in outputs] == lengths
    bench.engine.check_integrity()
    return {
        "requests": requests,
        "input_tokens": sum(map(len, prompts)),
        "output_tokens": sum(lengths),
        "wall_s": wall_s,
        "output_tokens_per_s": sum(lengths) / wall_s,
        "steps": after.steps - before.steps,
        "host_ms_per_step": 1e3 * (after.host_s - before.host_s) / (after.steps - before.steps),
        "retractions": after.retractions - before.retractions,
    }


@click.command()
@click.option("--model", type=click.Path(path_type=Path), default=None, help="Checkpoint folder.")
@click.option("--runs", default=5, help="Pairs of timed single streams.")
@click.option("--new", default=64, help="Output tokens of the timed streams.")
@click.option("--requests", default=32, help="Requests of the seed-0 workload.")
@click.option("--scale", default=8, help="Divides the seed-0 workload's lengths.")
@click.option("--max-running", default=32)
def main(
    model: Path | None, runs: int, new: int, requests: int, scale: int, max_running: int
) -> None:
    config = EngineConfig(model=model or default_folder(), max_running=max_running)
    bench = Bench(config)
    figures = {
        "model": config.model.name,
        "dtype": bench.engine.facts.dtype,
        "threads": torch.get_num_threads(),
        "streams": (of_streams := streams(bench, runs, new)),
        "seed_0": (of_seed_0 := seed_0(bench, requests, scale)),
    }
    table = Table("figure", "value", title=f"{config.model.name}, {figures['dtype']}")
    for name, value in of_streams["tokens_per_s"].items():
        table.add_row(f"{name}: tokens/s", f"{value:.1f}")
    for name in ("one_over_transformers", "sixteen_over_one"):
        table.add_row(name, f"{of_streams[name]:.2f} ×")
    for name, value in of_seed_0.items():
        table.add_row(f"seed 0: {name}", f"{value:.4g}")
    Console().print(table)
    print(save("bench_offline", figures))


if __name__ == "__main__":
    main()
