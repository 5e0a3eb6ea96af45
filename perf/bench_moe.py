"""A mixture of experts on a GPU: its kernels beside their floor, and the tiles they should have.

    python -m perf.bench_moe            # checks, then times; perf/results/bench_moe.json
    python -m perf.bench_moe --tune     # first writes kernels/gpu_ops/moe_tiles.json
    python -m perf.bench_moe --step     # also Qwen3-30B-A3B's decode step at batch 64, context 600

Qwen3-30B-A3B's shape unless told otherwise; times are of one layer, from replays of a graph over
LAYERS layers, so that no weight is still in L2. The router's logits are random: experts are about
as evenly used as a router can make them. Floor: the bytes of experts that have a token, at 4.1
TB/s, or the products at 700 TFLOP/s, whichever takes longer. All outputs are held against the
reference in float32 before anything is timed.
"""

import random
import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import click
import torch

import perf  # noqa: F401  (the path)
from engine.build import build_engine
from engine.config import EngineConfig
from engine.cuda_executor import CudaExecutor
from engine.models.moe import MoeMlp
from gpu_ops import moe_tiles
from gpu_ops.moe_tiles import MoeShape
from perf.bench_step import TimedExecutor, forget_prompts, profiled, show
from perf.bench_step import run as run_workload
from perf.gpu_timing import ceilings, device_facts
from perf.moe_layers import A3B, FLOOR_TB_S, LIMIT, Experts, Step
from perf.moe_tuning import as_row, tune
from perf.results import save
from perf.workloads import MODELS, Workload, write_config

Tensor = torch.Tensor

TOKENS: Final = (1, 8, 32, 64, 128, 256, 4096, 16384)


def time_tokens(experts: Experts) -> Iterator[dict[str, Any]]:
    for tokens in TOKENS:
        step = Step.random(experts, tokens)
        error = step.error(step.run()[-1])
        if not error <= LIMIT:
            raise SystemExit(f"{tokens} tokens: error {error:.2e} of the norm, limit {LIMIT:.2e}")
        us = step.layer_us(step.run)
        floor_us, active = step.floor_us()
        tiles = moe_tiles.tiles_for(experts.model.device, experts.shape, tokens)
        row = {
            "tokens": tokens,
            "active_experts": active,
            "us": round(us, 1),
            "floor_us": round(floor_us, 1),
            "share_of_floor": round(floor_us / us, 3),
            "error": error,
            "tiles": as_row(tokens, tiles),
        }
        print(
            f"{tokens:6d} tokens {active:4d} experts {us:9.1f} us  floor {floor_us:8.1f}"
            f"  {floor_us / us:.3f}  error {error:.1e}",
            flush=True,
        )
        yield row


def decode_step(batch: int = 64, context: int = 600) -> dict[str, Any]:
    """The whole model in the engine, random weights: a decode step's wall time and its floor."""
    rng = random.Random(0)
    new = 60
    prompts = [[rng.randint(0, 100_000) for _ in range(context - new // 2)] for _ in range(batch)]
    with tempfile.TemporaryDirectory() as folder:
        config = EngineConfig(
            write_config(Path(folder), "30B-A3B"),
            device="cuda",
            load_format="dummy",
            max_running=batch,
            max_model_len=1024,
            prefill_budget=16_384,
        )
        engine = build_engine(config)
    executor = engine._executor
    assert isinstance(executor, CudaExecutor)
    timed = engine._executor = TimedExecutor(executor)
    load = Workload(prompts, [new] * batch, 0.6)
    results = []
    for index in range(3):
        forget_prompts(engine)
        results.append(run_workload(engine, timed, load, 1000 * index))
    forget_prompts(engine)
    profile = profiled(engine, load, 100_000, 12)
    show(profile)
    band = next(name for name in results[0]["decode_ms"] if name.endswith(f"-{batch}"))
    ms = statistics.median(result["decode_ms"][band] for result in results)
    active = active_experts(executor, batch)
    floor_ms = decode_floor_ms(batch, context, active)
    print(
        f"decode step, {batch} x {context}, {active:.0f} active experts: {ms:.2f} ms,"
        f" floor {floor_ms:.2f}",
        flush=True,
    )
    return {
        "ms": ms,
        "floor_ms": floor_ms,
        "over_floor": ms / floor_ms,
        "active_experts": active,
        "runs": results,
        "profile": profile,
    }


def active_experts(executor: CudaExecutor, batch: int) -> float:
    """Experts that have a token in a decode step, the mean of the layers.

    Runs one more step, of all rows as they were left.
    """
    found: list[int] = []

    def counting(router: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def count(x: Tensor) -> Tensor:
            logits = router(x)
            found.append(len(torch.unique(logits.float().topk(A3B.top_k).indices)))
            return logits

        return count

    for layer in executor._decode._parts.model.layers:
        assert isinstance(layer.mlp, MoeMlp)
        layer.mlp.router = counting(layer.mlp.router)  # type: ignore[assignment]
    with torch.inference_mode():
        executor._rows.decode_rows[:batch] = torch.arange(batch, device="cuda")
        executor._decode.ring.leave(None)  # else a former step's changes are made again
        executor._decode._forward(batch)
    return statistics.mean(found)


def decode_floor_ms(batch: int, context: int, active: float) -> float:
    """Bytes at 4.1 TB/s: active experts, other weights, keys and values."""
    shape = MODELS["30B-A3B"]
    heads = (2 * shape.q_heads + 2 * shape.kv_heads) * shape.head_dim
    layer = active * 3 * A3B.ffn * A3B.size + heads * A3B.size + A3B.experts * A3B.size
    keys = batch * context * 2 * shape.kv_heads * shape.head_dim
    elements = shape.layers * (layer + keys) + shape.vocabulary * A3B.size
    return 2 * elements / FLOOR_TB_S / 1e9


@click.command()
@click.option("--tune", "tuned", is_flag=True, help="Look for the best tiles first; keep them.")
@click.option("--step", "stepped", is_flag=True, help="Also time the whole model's decode step.")
@click.option("--shape", nargs=4, type=int, default=A3B[:4], help="size, f, experts, active ones")
def main(tuned: bool, stepped: bool, shape: tuple[int, int, int, int]) -> None:
    torch.manual_seed(0)
    measured = ceilings()
    torch.cuda.empty_cache()
    experts = Experts.random(MoeShape(*shape, 2))
    if tuned:
        tune(experts)
    figures = {
        "ceilings": measured,
        **device_facts(),
        "shape": str(experts.shape),
        "rows": list(time_tokens(experts)),
    }
    del experts
    torch.cuda.empty_cache()
    if stepped:
        figures["decode_step"] = decode_step()
    print(save("bench_moe", figures, figures["gpu"]))


if __name__ == "__main__":
    main()
