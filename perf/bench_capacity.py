"""What the capacity report says before anything is loaded, against what the engine then takes.

    python -m perf.bench_capacity [--model 0.6B]

One GPU, random weights of the right shapes. The predicted and the real number of KV tokens; what
the driver, the largest prefill and the graphs took; the predicted ceiling of decode steps against
steps that are timed. One model a process, as in a server.
"""

import dataclasses
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

import perf  # noqa: F401  (the path)
from engine import build, cuda_memory
from engine.config import EngineConfig
from engine.core import Engine
from engine.cuda_memory import StepBytes
from engine.model_config import read_model_config
from engine.request import Request, SamplingParams
from perf.results import save
from perf.workloads import write_config
from runtime.capacity.estimate import Asked, report_on
from runtime.capacity.gpu import GpuMemory
from runtime.capacity.host import read_host
from runtime.capacity.nvml import Nvml
from runtime.capacity.report import Capacity


def used_bytes(nvml: Nvml) -> int:
    memory = nvml.read().gpus[0].activity.memory
    assert isinstance(memory, GpuMemory)
    return memory.used_bytes


def decode_step_s(engine: Engine, batch: int, context: int) -> float | None:
    """Median of the steps of so many rows, each about `context` tokens long.

    None where so many never ran together for long.
    """
    prompt = np.random.default_rng(0).integers(0, 1000, context - 32, dtype=np.int32)
    for number in range(batch):
        # So many that all run together for a while, though the first began long before the last.
        params = SamplingParams(max_new_tokens=64 + batch, temperature=0.6, ignore_eos=True)
        engine.submit(Request(number + 1, prompt + number, params, seed=number))
    done, rows = [], []
    while engine.has_work:
        output = engine.step()
        if output is not None:
            done.append(time.perf_counter())
            rows.append(len(output.token_ids))
    whole = [b - a for a, b, n in zip(done, done[1:], rows[1:], strict=False) if n == batch]
    return float(np.median(whole[1:33])) if len(whole) > 8 else None


def compare(model: str, folder: Path, nvml: Nvml) -> dict[str, Any]:
    """What was foreseen of a model with random weights, and what its engine then took."""
    write_config(folder, model)
    config = EngineConfig(folder, device="cuda", load_format="dummy", max_model_len=16_384)
    shape = read_model_config(folder)
    before = used_bytes(nvml)
    report = report_on(nvml.read(), read_host(), Asked(config, shape, model))
    assert report.split is not None
    seen: list[StepBytes] = []
    torch.zeros(1, device="cuda")
    context_only = used_bytes(nvml) - before
    measure = cuda_memory.measure_step_bytes

    def measured(*args: Any, **kwargs: Any) -> StepBytes:
        seen.append(measure(*args, **kwargs))
        return seen[-1]

    cuda_memory.measure_step_bytes = measured
    try:
        engine = build.build_engine(config)
    finally:
        cuda_memory.measure_step_bytes = measure
    split, real = report.split, engine.facts.kv_tokens
    memory = report.devices.gpus[0].activity.memory
    assert memory is not None
    figures = {
        "model": model,
        "predicted": dataclasses.asdict(split),
        "kv_tokens": real,
        "kv_tokens_error": split.kv_tokens / real - 1,
        "context_bytes": context_only,
        "besides_weights_bytes": memory.free_bytes - seen[0].free - split.weight_bytes,
        "prefill_bytes": seen[0].prefill,
        "graph_bytes": seen[0].graphs,
        "decode": decode_figures(engine, report),
        "notes": report.notes,
    }
    engine.close()
    return figures


def decode_figures(engine: Engine, report: Capacity) -> list[dict[str, Any]]:
    """Steps of few, some and many rows, each beside its floor; without those that do not fit."""
    figures = []
    for floor in report.decode:
        if floor.context == 1024 and floor.batch in (1, 64, 256):
            took_s = decode_step_s(engine, floor.batch, floor.context)
            if took_s is None:
                continue
            figures.append(
                {
                    "batch": floor.batch, "context": floor.context, "floor_s": floor.floor_s,
                    "step_s": took_s, "tokens_per_s": floor.batch / took_s,
                    "ceiling_tokens_per_s": floor.tokens_per_s,
                }
            )  # fmt: skip
    return figures


@click.command()
@click.option("--model", default="0.6B", show_default=True)
def main(model: str) -> None:
    """Compares the capacity report with the engine."""
    nvml = Nvml()
    with tempfile.TemporaryDirectory() as folder:
        figures = compare(model, Path(folder), nvml)
    print(figures, flush=True)
    print(save(f"bench_capacity_{model}", figures, nvml.read().gpus[0].name))


if __name__ == "__main__":
    main()
