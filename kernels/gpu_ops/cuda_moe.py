"""`ops.moe` on CUDA: entries sorted by expert on the device, two grouped products, one sum.

Guarantees
- Launches on torch's current stream; does not synchronise; safe under graph capture: every size
  follows from shapes, and blocks that a step does not need end at once.
- A token's result does not depend on the other tokens, but for what their number says of tiles.

Rounded to the dtype: silu(gate) * up, each expert's weighted output, and their float32 sum in order
of rank. Shapes that `takes` refuses, and hosts where Triton does not work, get the reference, which
synchronises: `prepare` says so beforehand.
"""

import functools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import torch

from gpu_ops import reference
from gpu_ops.cuda_compile import CompileError
from gpu_ops.moe_tiles import MoeShape, Tile, Tiles, all_tiles, tiles_for
from gpu_ops.triton_compile import Program, compiled
from gpu_ops.triton_launch import launch

Tensor = torch.Tensor
Launch = Callable[..., None]  # as `triton_launch.launch`

log = logging.getLogger(__name__)

_TYPES: Final = {torch.bfloat16: "bf16", torch.float32: "fp32"}
_MOST_TOKENS: Final = 16_384  # at once: bounds what a pass needs beside its result
FEW_TOKENS: Final = 512
_MOST_EXPERTS: Final = 1024
_MOST_RANKS: Final = 32
_TILE_ELEMENTS: Final = 4096  # of the router's logits and counts, to a block
_SUM_BLOCK: Final = 1024
_ALIGNMENT: Final = 16  # bytes, of pointers


def takes(w13: Tensor, top_k: int) -> bool:
    """Whether the kernels know experts like these, [experts, 2 f, size]."""
    experts, rows, size = w13.shape
    return (
        w13.dtype in _TYPES
        and experts <= _MOST_EXPERTS
        and top_k <= min(experts, _MOST_RANKS)
        and rows * size < 1 << 31
        and w13.is_contiguous()
        and w13.data_ptr() % _ALIGNMENT == 0
    )


def prepare(w13: Tensor, top_k: int, renormalise: bool) -> bool:
    """Compiles all that `moe` may need for these experts; False where the reference computes them.

    Blocks, for seconds where the cache has nothing.
    """
    return takes(w13, top_k) and _is_compiled(model_of(w13, top_k, renormalise))


def moe(
    x: Tensor, router_logits: Tensor, w13: Tensor, w2: Tensor, top_k: int, renormalise: bool
) -> Tensor:
    """As `ops.moe`."""
    if not prepare(w13, top_k, renormalise):
        return _reference(x, router_logits, w13, w2, top_k, renormalise)
    model = model_of(w13, top_k, renormalise)
    x, router_logits, w2 = _aligned(x), _aligned(router_logits), _aligned(w2)
    out = torch.empty_like(x)
    for begin in range(0, len(x), _MOST_TOKENS):
        end = begin + _MOST_TOKENS
        tiles = tiles_for(model.device, model.shape, min(len(x), _MOST_TOKENS))
        run(x[begin:end], router_logits[begin:end], w13, w2, out[begin:end], model, tiles)
    return out


def _aligned(x: Tensor) -> Tensor:
    """x itself wherever a model runs; else a copy that the kernels can read."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % _ALIGNMENT else x


def _reference(
    x: Tensor, router_logits: Tensor, w13: Tensor, w2: Tensor, top_k: int, renormalise: bool
) -> Tensor:
    _tell_once(f"experts {[*w13.shape]} in {w13.dtype}, {top_k} active")
    return reference.moe(x, router_logits, w13, w2, top_k, renormalise)


@functools.cache
def _tell_once(what: str) -> None:
    log.warning("%s: no kernel takes them; torch computes them, slowly and without graphs", what)


@dataclass(frozen=True, slots=True)
class Model:
    """What of a model and its device decides the programs."""

    shape: MoeShape
    renormalise: bool
    device: str  # its name
    arch: int

    @property
    def type(self) -> str:
        return "bf16" if self.shape.element_bytes == 2 else "fp32"


@functools.cache
def _device(device: torch.device) -> tuple[str, int]:
    major, minor = torch.cuda.get_device_capability(device)
    return torch.cuda.get_device_name(device), 10 * major + minor


def model_of(w13: Tensor, top_k: int, renormalise: bool) -> Model:
    experts, rows, size = w13.shape
    shape = MoeShape(size, rows // 2, experts, top_k, w13.element_size())
    return Model(shape, renormalise, *_device(w13.device))


@functools.cache
def _is_compiled(model: Model) -> bool:
    programs = {
        program
        for tiles in all_tiles(model.device, model.shape)
        for few in (True, False)
        for program in programs_of(model, tiles, few)
    }
    try:
        compiled(sorted(programs, key=repr))
    except (CompileError, OSError) as error:
        log.warning("%s", error)
        return False
    return True


@dataclass(frozen=True, slots=True)
class Programs:
    """The five kernels of one pass, in order."""

    route: Program
    align: Program
    gate_up: Program
    down: Program
    combine: Program

    def __iter__(self) -> Iterator[Program]:
        return iter((self.route, self.align, self.gate_up, self.down, self.combine))


def _power_above(n: int) -> int:
    return 1 << (n - 1).bit_length()


@functools.cache
def programs_of(model: Model, tiles: Tiles, few: bool) -> Programs:
    """few  whether the tokens are at most FEW_TOKENS."""
    shape, floats = model.shape, f"*{model.type}"
    columns = _power_above(shape.experts)
    lines = max(1, _TILE_ELEMENTS // columns)

    def program(
        kernel: str, types: tuple[str, ...], warps: int, stages: int = 1, **constants: int
    ) -> Program:
        settled = tuple({**constants, "OVERLAP": 1}.items())
        return Program("moe_kernels", kernel, types, settled, warps, stages, model.arch)

    def product(kernel: str, types: tuple[str, ...], tile: Tile, **constants: int) -> Program:
        return program(
            kernel, types, tile.warps, tile.stages, SIZE=shape.size, FFN=shape.ffn,
            BLOCK_M=tiles.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
            WEIGHTS_FIRST=tile.weights_first, **constants,
        )  # fmt: skip

    integers = "*i32"
    blocks = (integers, integers, integers, "i32")
    return Programs(
        route=program(
            "route", (floats, "*fp32", integers, integers, "i32"), 4 if few else 8,
            EXPERTS=shape.experts, COLUMNS=columns, TOP_K=shape.top_k,
            RANKS=_power_above(shape.top_k), RENORMALISE=int(model.renormalise),
            ROWS=route_rows(shape, few),
        ),
        align=program(
            "align", (integers,) * 5 + ("i32", "i32"), 4 if few else 8,
            EXPERTS=shape.experts, COLUMNS=columns, BLOCK_M=tiles.block_m, PARTS=lines,
            CHUNK=1024 if few else 4096,
        ),
        gate_up=product("gate_up", (floats,) * 3 + blocks, tiles.gate_up, TOP_K=shape.top_k),
        down=product("down", (floats, floats, "*fp32", floats, *blocks), tiles.down),
        combine=program(
            "combine", (floats, floats), 4, SIZE=shape.size, TOP_K=shape.top_k, BLOCK=_SUM_BLOCK
        ),
    )  # fmt: skip


def route_rows(shape: MoeShape, few: bool) -> int:
    """Tokens to a block of `route`: few make more blocks."""
    lines = max(1, _TILE_ELEMENTS // _power_above(shape.experts))
    return min(4, lines) if few else min(32, lines)


def run(
    x: Tensor,
    router_logits: Tensor,
    w13: Tensor,
    w2: Tensor,
    out: Tensor,
    model: Model,
    tiles: Tiles,
    launch: Launch = launch,
) -> None:
    """Writes out [n, size], for n of at least 1 and at most _MOST_TOKENS."""
    shape, tokens = model.shape, len(x)
    few = tokens <= FEW_TOKENS
    programs = programs_of(model, tiles, few)
    entries = tokens * shape.top_k
    parts = -(-tokens // route_rows(shape, few))
    blocks = most_blocks(entries, shape.experts, tiles.block_m)

    def integers(*sizes: int) -> Tensor:
        return torch.empty(sizes, dtype=torch.int32, device=x.device)

    weights = torch.empty(entries, dtype=torch.float32, device=x.device)
    ids, counts = integers(entries), integers(parts, shape.experts)
    where = integers(blocks * tiles.block_m), integers(blocks), integers(1)
    hidden = x.new_empty((entries, shape.ffn))
    results = x.new_empty((entries, shape.size))
    launch(programs.route, parts, router_logits, weights, ids, counts, tokens)
    launch(programs.align, shape.experts, ids, counts, *where, entries, parts)
    columns = -(-shape.ffn // tiles.gate_up.block_n)
    launch(programs.gate_up, blocks * columns, x, w13, hidden, *where, entries)
    columns = -(-shape.size // tiles.down.block_n)
    launch(programs.down, blocks * columns, hidden, w2, weights, results, *where, entries)
    launch(programs.combine, tokens * -(-shape.size // _SUM_BLOCK), results, out)


def most_blocks(entries: int, experts: int, block_m: int) -> int:
    """Blocks that so many entries can need, however they are shared out."""
    used = min(entries, experts)
    return used + (entries - used) // block_m
