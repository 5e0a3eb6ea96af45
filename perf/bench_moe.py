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

import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import click
import torch

import perf  # noqa: F401  (the path)
from engine.build import build_engine
from engine.config import EngineConfig
from gpu_ops import cuda_moe, moe_tiles, ops, reference
from gpu_ops.cuda_moe import Model
from gpu_ops.moe_tiles import MoeShape, Tile, Tiles
from gpu_ops.triton_compile import compiled
from perf.bench_step import TimedExecutor, forget_prompts
from perf.bench_step import run as run_workload
from perf.gpu_timing import capture, ceilings, device_facts, replay_times_ms
from perf.results import save
from perf.workloads import MODELS, Workload, write_config

Tensor = torch.Tensor

A3B: Final = MoeShape(2048, 768, 128, 8, 2)
TOKENS: Final = (1, 8, 32, 64, 128, 256, 4096, 16384)
TUNED: Final = (1, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096, 16384)
LAYERS: Final = 4
FLOOR_TB_S: Final = 4.1
FLOOR_TFLOPS: Final = 700.0
LIMIT: Final = 3 * 2.0**-9  # three roundings to bfloat16, of the norm

# What may be best, by rows of a block: (gate_up's tiles, down's). Few rows are bound by memory:
# 64 to 150 KB on their way to each multiprocessor, in blocks of which two or three fit.
_Candidates = tuple[tuple[Tile, ...], tuple[Tile, ...]]
FEW: Final[dict[int, _Candidates]] = {
    16: (
        (
            Tile(64, 128, 4, 3, 1), Tile(64, 64, 4, 4, 1), Tile(64, 64, 4, 6, 1),
            Tile(128, 64, 4, 3, 1), Tile(64, 256, 4, 2, 1), Tile(32, 128, 4, 4, 0),
            Tile(64, 128, 4, 4, 0), Tile(64, 64, 4, 5, 0),
        ),
        (
            Tile(64, 128, 4, 4, 1), Tile(64, 64, 4, 6, 1), Tile(128, 64, 4, 5, 1),
            Tile(128, 128, 4, 3, 1), Tile(64, 256, 4, 3, 1), Tile(64, 128, 4, 5, 0),
            Tile(128, 64, 4, 5, 0),
        ),
    ),
}  # fmt: skip
SOME: Final[dict[int, _Candidates]] = {
    32: (
        (
            Tile(64, 128, 4, 3, 1), Tile(64, 64, 4, 4, 1), Tile(128, 64, 4, 3, 1),
            Tile(64, 128, 4, 3, 0),
        ),
        (
            Tile(64, 128, 4, 4, 1), Tile(128, 64, 4, 5, 1), Tile(128, 128, 4, 3, 1),
            Tile(128, 64, 4, 4, 0),
        ),
    ),
    64: (
        (Tile(64, 64, 4, 4, 0), Tile(64, 64, 4, 3, 1), Tile(128, 64, 8, 3, 0)),
        (Tile(128, 64, 4, 4, 0), Tile(128, 64, 4, 4, 1), Tile(128, 128, 4, 3, 0)),
    ),
}  # fmt: skip
MANY: Final[dict[int, _Candidates]] = {
    64: (
        (Tile(64, 64, 4, 4, 0), Tile(128, 64, 4, 3, 0), Tile(128, 64, 8, 3, 0)),
        (Tile(128, 64, 4, 4, 0), Tile(256, 64, 8, 3, 0), Tile(128, 128, 4, 3, 0)),
    ),
    128: (
        (
            Tile(128, 64, 8, 3, 0), Tile(128, 64, 8, 4, 0), Tile(64, 64, 8, 4, 0),
            Tile(64, 64, 4, 4, 0),
        ),
        (
            Tile(256, 64, 8, 3, 0), Tile(128, 64, 8, 4, 0), Tile(128, 64, 4, 4, 0),
            Tile(128, 128, 8, 3, 0),
        ),
    ),
}  # fmt: skip


def candidates(shape: MoeShape, tokens: int) -> dict[int, _Candidates]:
    """By rows of a block: those near the entries that an expert has."""
    mean = tokens * shape.top_k / shape.experts
    if mean < 8:
        return FEW
    if mean < 16:
        return {**FEW, 32: SOME[32]}
    return SOME if mean < 64 else MANY


@dataclass(frozen=True, slots=True)
class Experts:
    """LAYERS layers' weights."""

    shape: MoeShape
    w13: list[Tensor]
    w2: list[Tensor]

    @classmethod
    def random(cls, shape: MoeShape) -> "Experts":
        def weights(*sizes: int) -> Tensor:
            empty = torch.empty(sizes, dtype=torch.bfloat16, device="cuda")
            return empty.normal_(0, sizes[-1] ** -0.5)

        size, ffn, experts = shape.size, shape.ffn, shape.experts
        w13 = [weights(experts, 2 * ffn, size) for _ in range(LAYERS)]
        return cls(shape, w13, [weights(experts, size, ffn) for _ in range(LAYERS)])

    @property
    def model(self) -> Model:
        return cuda_moe.model_of(self.w13[0], self.shape.top_k, True)


@dataclass(frozen=True, slots=True)
class Step:
    """Inputs of one number of tokens."""

    experts: Experts
    x: Tensor
    logits: Tensor

    @classmethod
    def random(cls, experts: Experts, tokens: int) -> "Step":
        shape = experts.shape
        x = torch.randn(tokens, shape.size, device="cuda").to(torch.bfloat16)
        return cls(experts, x, torch.randn(tokens, shape.experts, device="cuda").to(x.dtype))

    def run(self) -> list[Tensor]:
        """Every layer, as a model runs it."""
        shape = self.experts.shape
        return [
            ops.moe(self.x, self.logits, w13, w2, shape.top_k, True)
            for w13, w2 in zip(self.experts.w13, self.experts.w2, strict=True)
        ]

    def run_with(self, tiles: Tiles) -> Tensor:
        """Every layer with these tiles; the last one's result."""
        out = torch.empty_like(self.x)
        for w13, w2 in zip(self.experts.w13, self.experts.w2, strict=True):
            cuda_moe.run(self.x, self.logits, w13, w2, out, self.experts.model, tiles)
        return out

    def layer_us(self, run: Callable[[], object], replays: int = 20) -> float:
        times = replay_times_ms(capture(run), replays)
        return statistics.median(times) * 1e3 / LAYERS

    def expected(self, layer: int) -> Tensor:
        """The reference in float32."""
        w13, w2 = self.experts.w13[layer].float(), self.experts.w2[layer].float()
        shape = self.experts.shape
        return reference.moe(self.x.float(), self.logits.float(), w13, w2, shape.top_k, True)

    def floor_us(self) -> tuple[float, int]:
        """And how many experts have a token."""
        shape = self.experts.shape
        chosen = self.logits.float().topk(shape.top_k).indices
        active = len(chosen.unique())
        moved = active * 3 * shape.ffn * shape.size * 2 + 2 * self.x.nbytes + self.logits.nbytes
        flops = 6 * chosen.numel() * shape.ffn * shape.size
        return max(moved / FLOOR_TB_S / 1e6, flops / FLOOR_TFLOPS / 1e6), active


def check(step: Step, found: Tensor, layer: int, what: str) -> float:
    """The error, of the norm. Raises SystemExit where it is too large."""
    expected = step.expected(layer)
    error = float((found.float() - expected).norm() / expected.norm())
    if not error <= LIMIT:
        raise SystemExit(f"{what}: error {error:.2e} of the norm, limit {LIMIT:.2e}")
    return error


def time_tokens(experts: Experts) -> Iterator[dict[str, Any]]:
    for tokens in TOKENS:
        step = Step.random(experts, tokens)
        error = check(step, step.run()[-1], LAYERS - 1, f"{tokens} tokens")
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


def as_row(tokens: int, tiles: Tiles) -> dict[str, Any]:
    """As the table has it."""
    return {
        "tokens": tokens,
        "block_m": tiles.block_m,
        "gate_up": [*tiles.gate_up],
        "down": [*tiles.down],
    }


def tune(experts: Experts) -> None:
    """Writes the table's rows for this device and shape."""
    begun = time.perf_counter()
    model = experts.model
    programs = {
        program
        for tokens in TUNED
        for block_m, (gate_ups, downs) in candidates(experts.shape, tokens).items()
        for tiles in [
            *(Tiles(block_m, tile, downs[0]) for tile in gate_ups),
            *(Tiles(block_m, gate_ups[0], tile) for tile in downs),
        ]
        for program in cuda_moe.programs_of(model, tiles, tokens <= cuda_moe.FEW_TOKENS)
    }
    compiled(sorted(programs, key=repr))
    print(f"{len(programs)} programs after {time.perf_counter() - begun:.1f} s", flush=True)
    rows = [best_tiles(experts, tokens) for tokens in TUNED]
    table = json.loads(moe_tiles.TABLE.read_text())
    table.setdefault(model.device, {})[str(experts.shape)] = rows
    moe_tiles.TABLE.write_text(as_text(table))
    moe_tiles.forget()
    print(f"tuned after {time.perf_counter() - begun:.1f} s", flush=True)


def as_text(table: dict[str, Any]) -> str:
    """JSON with a line for each row."""
    devices = []
    for device, shapes in table.items():
        parts = []
        for shape, rows in shapes.items():
            lines = ",\n".join(f"   {json.dumps(row)}" for row in rows)
            parts.append(f"  {json.dumps(shape)}: [\n{lines}\n  ]")
        devices.append(f" {json.dumps(device)}: {{\n" + ",\n".join(parts) + "\n }")
    return "{\n" + ",\n".join(devices) + "\n}\n"


def best_tiles(experts: Experts, tokens: int) -> dict[str, Any]:
    """First gate_up's tile, then down's, for each number of rows that a block may have."""
    step = Step.random(experts, tokens)
    expected = step.expected(LAYERS - 1)
    found: dict[Tiles, float] = {}

    def us_of(tiles: Tiles) -> float:
        if tiles not in found:
            out = step.run_with(tiles)
            error = float((out.float() - expected).norm() / expected.norm())
            right = error <= LIMIT
            found[tiles] = step.layer_us(lambda: step.run_with(tiles), 9) if right else float("inf")
            print(f"   {tokens:6d} {found[tiles]:9.1f} us  {tiles}", flush=True)
        return found[tiles]

    for block_m, (gate_ups, downs) in candidates(experts.shape, tokens).items():
        start = Tiles(block_m, gate_ups[0], downs[0])
        chosen = min((replace(start, gate_up=tile) for tile in gate_ups), key=us_of)
        for tile in downs:
            us_of(replace(chosen, down=tile))
    best = min(found, key=lambda tiles: found[tiles])
    print(f"{tokens:6d} tokens: {found[best]:.1f} us with {best}", flush=True)
    return as_row(tokens, best)


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
    timed = engine._executor = TimedExecutor(engine._executor)
    load = Workload(prompts, [new] * batch, 0.6)
    results = []
    for index in range(3):
        forget_prompts(engine)
        results.append(run_workload(engine, timed, load, 1000 * index))
    band = next(name for name in results[0]["decode_ms"] if name.endswith(f"-{batch}"))
    ms = statistics.median(result["decode_ms"][band] for result in results)
    floor_ms = decode_floor_ms(batch, context)
    print(f"decode step, {batch} x {context}: {ms:.2f} ms, floor {floor_ms:.2f}", flush=True)
    return {"ms": ms, "floor_ms": floor_ms, "over_floor": ms / floor_ms, "runs": results}


def decode_floor_ms(batch: int, context: int) -> float:
    """Bytes at 4.1 TB/s: experts that evenly spread choices reach, other weights, keys, values."""
    shape = MODELS["30B-A3B"]
    active = A3B.experts * (1 - (1 - A3B.top_k / A3B.experts) ** batch)
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
