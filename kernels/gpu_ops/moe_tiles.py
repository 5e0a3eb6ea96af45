"""How a mixture of experts is cut into tiles, by device, shape and number of tokens.

The table is data, moe_tiles.json, as `python -m perf.bench_moe --tune` wrote it. What it does not
have gets tiles by rules of thumb. Knows nothing of kernels but what they call their constants.
"""

import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

TABLE: Final = Path(__file__).resolve().parent / "moe_tiles.json"
_ASSUMED: Final = (16, 64, 128, 256, 512, 1024, 2048, 4096)  # tokens: where a rule may change


class MoeShape(NamedTuple):
    """What of a model decides its tiles."""

    size: int
    ffn: int  # of one expert
    experts: int
    top_k: int
    element_bytes: int  # 2 is bfloat16, 4 float32

    def __str__(self) -> str:
        return "{}x{}, {} experts, {} active, {} bytes".format(*self)


class Tile(NamedTuple):
    """One product's tile: BLOCK_N x BLOCK_K of an expert's weights at a time."""

    block_n: int
    block_k: int
    warps: int
    stages: int
    weights_first: int  # 1: the weights' rows are the matrix unit's, for blocks of few tokens


@dataclass(frozen=True, slots=True)
class Tiles:
    """Both products' tiles; a block of entries has block_m of them."""

    block_m: int
    gate_up: Tile
    down: Tile


def tiles_for(device: str, shape: MoeShape, tokens: int) -> Tiles:
    """Those measured for the next larger number of tokens, or else assumed."""
    table = _measured(device, shape) or _assumed(shape)
    for most, tiles in table:
        if tokens <= most:
            return tiles
    return table[-1][1]


def all_tiles(device: str, shape: MoeShape) -> Iterator[Tiles]:
    """Every one that `tiles_for` may give."""
    for _, tiles in _measured(device, shape) or _assumed(shape):
        yield tiles


def forget() -> None:
    """Reads the table again at the next call."""
    _measured.cache_clear()


@functools.cache
def _measured(device: str, shape: MoeShape) -> tuple[tuple[int, Tiles], ...]:
    """(tokens up to which they are used, tiles), ascending; empty where nothing was measured."""
    rows = json.loads(TABLE.read_text()).get(device, {}).get(str(shape), ())
    return tuple((row["tokens"], read_tiles(row)) for row in rows)


def read_tiles(row: dict[str, object]) -> Tiles:
    """From a row of the table, or of a result's."""
    gate_up, down = (Tile(*row[name]) for name in ("gate_up", "down"))  # type: ignore[misc]
    return Tiles(int(row["block_m"]), gate_up, down)  # type: ignore[call-overload]


@functools.cache
def _assumed(shape: MoeShape) -> tuple[tuple[int, Tiles], ...]:
    return tuple((tokens, _assume(shape, tokens)) for tokens in _ASSUMED)


def _assume(shape: MoeShape, tokens: int) -> Tiles:
    """Blocks about as large as the entries of an expert, weights read in long pieces."""
    if shape.element_bytes == 4:  # no tensor cores: float32 is for tests
        tile = Tile(32, 32, 4, 2, 0)
        return Tiles(16, tile, tile)
    mean = tokens * shape.top_k / shape.experts
    if mean <= 8:
        return Tiles(16, Tile(64, 128, 4, 3, 1), Tile(64, 128, 4, 4, 1))
    if mean <= 20:
        return Tiles(32, Tile(64, 128, 4, 3, 1), Tile(64, 128, 4, 4, 1))
    if mean <= 96:
        return Tiles(64, Tile(64, 64, 4, 4, 0), Tile(128, 64, 4, 4, 0))
    return Tiles(128, Tile(128, 64, 8, 3, 0), Tile(256, 64, 8, 3, 0))
