"""Prefill on one GPU: how long prompts take until their first token, and at what rate.

    python -m perf.bench_prefill [--model 0.6B] [--runs 7]

Random weights of the right shapes, all prompts of a case in one step. Time runs from the submission
to the first tokens on the host, so it holds what the host does, too. The rate counts the products
of the layers and of the sampled rows' logits, and causal attention's half.
"""

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import click
import numpy as np

import perf  # noqa: F401  (the path)
from engine.build import build_engine
from engine.config import EngineConfig
from engine.core import Engine
from engine.request import Request, SamplingParams
from perf.bench_decode_graph import SHAPES, Shape
from perf.bench_step import forget_prompts
from perf.gpu_timing import ceilings, device_facts
from perf.results import save
from perf.workloads import write_config

CASES: Final = ((1, 128), (1, 1024), (4, 4096), (1, 32_768))  # prompts, tokens each


def flops(shape: Shape, prompts: int, tokens: int) -> float:
    """Of one step; a multiplication and an addition are two."""
    heads = (2 * shape.q_heads + 2 * shape.kv_heads) * shape.head_dim
    layer = shape.hidden * (heads + 3 * shape.ffn)
    products = 2.0 * prompts * tokens * shape.layers * layer
    head = 2.0 * prompts * shape.hidden * shape.vocabulary
    attention = 4.0 * prompts * shape.layers * shape.q_heads * shape.head_dim * tokens**2 / 2
    return products + head + attention


def first_tokens_s(engine: Engine, first_id: int, prompts: int, tokens: int) -> float:
    rng = np.random.default_rng(first_id)
    params = SamplingParams(1, temperature=0.0, ignore_eos=True)
    requests = [
        Request(first_id + index, rng.integers(0, 10_000, tokens, np.int32), params, seed=0)
        for index in range(prompts)
    ]
    begun, made = time.perf_counter(), 0
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        output = engine.step()
        made += 0 if output is None else len(output.token_ids)
    ended_s = time.perf_counter() - begun
    assert made == prompts
    forget_prompts(engine)
    return ended_s


@click.command()
@click.option("--model", default="0.6B", show_default=True)
@click.option("--runs", default=7, show_default=True)
def main(model: str, runs: int) -> None:
    measured = ceilings()
    most = max(prompts * tokens for prompts, tokens in CASES)
    with tempfile.TemporaryDirectory() as folder:
        config = EngineConfig(
            write_config(Path(folder), model), device="cuda", load_format="dummy",
            max_running=8, max_model_len=40_000, prefill_budget=most, target_itl_ms=0,
            max_kv_tokens=2 * most,
        )  # fmt: skip
        engine = build_engine(config)
    cases: list[dict[str, Any]] = []
    for number, (prompts, tokens) in enumerate(CASES):
        times = [
            first_tokens_s(engine, 1000 * number + 10 * run, prompts, tokens)
            for run in range(runs + 2)
        ][2:]  # the first two warm up
        seconds = statistics.median(times)
        tflops = flops(SHAPES[model], prompts, tokens) / seconds / 1e12
        cases.append({
            "prompts": prompts, "tokens": tokens, "ms": 1e3 * seconds, "tflops": tflops,
            "share_of_gemm": tflops / measured["gemm_8k_tflops"],
            "ms_all": [round(1e3 * value, 3) for value in times],
        })  # fmt: skip
        print({name: value for name, value in cases[-1].items() if name != "ms_all"}, flush=True)
    figures = {"model": model, "cases": cases, "ceilings": measured, **device_facts()}
    print(save(f"bench_prefill_{model}", figures, figures["gpu"]))


if __name__ == "__main__":
    main()
