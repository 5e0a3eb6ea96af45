"""Looks for the best tiles of a mixture of experts, among those that reasoning leaves.

`python -m perf.bench_moe --tune` calls it; the table is kernels/gpu_ops/moe_tiles.json.
"""

import json
import time
from dataclasses import replace
from typing import Any, Final

from gpu_ops import cuda_moe, moe_tiles
from gpu_ops.moe_tiles import MoeShape, Tile, Tiles
from gpu_ops.triton_compile import compiled
from perf.moe_layers import LIMIT, Experts, Step

TUNED: Final = (1, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096, 16384)  # tokens

# What may be best, by rows of a block: (gate_up's tiles, down's). Few rows are bound by memory:
# 64 to 150 KB on their way to each multiprocessor, in blocks of which two or three fit.
_Candidates = tuple[tuple[Tile, ...], tuple[Tile, ...]]
FEW: Final[dict[int, _Candidates]] = {
    16: (
        (
            Tile(64, 128, 4, 3, 1), Tile(64, 64, 4, 4, 1), Tile(64, 64, 4, 6, 1),
            Tile(128, 64, 4, 3, 1), Tile(64, 256, 4, 2, 1), Tile(32, 128, 4, 4, 0),
            Tile(64, 128, 4, 4, 0), Tile(64, 64, 4, 5, 0), Tile(64, 64, 4, 3, 1),
        ),
        (
            Tile(64, 128, 4, 4, 1), Tile(64, 64, 4, 6, 1), Tile(128, 64, 4, 5, 1),
            Tile(128, 128, 4, 3, 1), Tile(64, 256, 4, 3, 1), Tile(64, 128, 4, 5, 0),
            Tile(128, 64, 4, 5, 0), Tile(64, 64, 4, 4, 1), Tile(64, 128, 4, 3, 1),
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
    found: dict[Tiles, float] = {}

    def us_of(tiles: Tiles) -> float:
        if tiles not in found:
            right = step.error(step.run_with(tiles)) <= LIMIT
            found[tiles] = step.layer_us(lambda: step.run_with(tiles), 9) if right else float("inf")
            print(f"   {tokens:6d} {found[tiles]:9.1f} us  {tiles}", flush=True)
        return found[tiles]

    for block_m, (gate_ups, downs) in candidates(experts.shape, tokens).items():
        start = Tiles(block_m, gate_ups[0], downs[0])
        chosen = min((replace(start, gate_up=tile) for tile in gate_ups), key=us_of)
        for tile in downs:
            us_of(replace(chosen, down=tile))
    best = min(found, key=lambda tiles: found[tiles])
    if found[best] == float("inf"):
        raise SystemExit(f"{tokens} tokens: every result is wrong")
    print(f"{tokens:6d} tokens: {found[best]:.1f} us with {best}", flush=True)
    return as_row(tokens, best)


def as_row(tokens: int, tiles: Tiles) -> dict[str, Any]:
    """As the table has it."""
    return {
        "tokens": tokens,
        "block_m": tiles.block_m,
        "gate_up": [*tiles.gate_up],
        "down": [*tiles.down],
    }
