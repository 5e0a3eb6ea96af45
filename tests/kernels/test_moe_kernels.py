"""The Triton kernels of a mixture of experts, run by Triton's interpreter on the CPU.

The interpreter is chosen when Triton is imported, so the tests that need it run in a process of
their own: `TRITON_INTERPRET=1 pytest` on this file. It takes bfloat16 for integers, so all is in
float32 here. What only a GPU shows is in test_gpu_moe.py.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_ops import cuda_moe, reference
from gpu_ops.moe_tiles import MoeShape, Tile, Tiles
from gpu_ops.triton_compile import Program

Tensor = torch.Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="the interpreter has its own process")
SMALL = Tile(32, 16, 4, 1, 0)
SWAPPED = Tile(32, 32, 4, 1, 1)


@pytest.mark.skipif(INTERPRETED, reason="is that process")
def test_under_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.fixture(autouse=True)
def _loops_with_a_new_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.6's interpreter takes int() of an array of one element, which numpy 2.4 refuses."""
    if not INTERPRETED:
        return
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_more(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch_more)


def interpret(program: Program, blocks: int, *arguments: Any) -> None:
    """A `Launch` that checks what the program says of its arguments, and has no next kernel."""
    from gpu_ops import moe_kernels

    assert len(program.types) == len(arguments)
    kinds = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32"}
    for kind, argument in zip(program.types, arguments, strict=True):
        assert kind == (kinds[argument.dtype] if isinstance(argument, Tensor) else "i32")
    constants = {**dict(program.constants), "OVERLAP": 0}
    getattr(moe_kernels, program.kernel)[(blocks,)](*arguments, **constants)


def run(
    x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor, top_k: int, renormalise: bool, tiles: Tiles
) -> Tensor:
    experts, rows, size = w13.shape
    shape = MoeShape(size, rows // 2, experts, top_k, x.element_size())
    model = cuda_moe.Model(shape, renormalise, "none", 90)
    out = torch.full_like(x, float("nan"))
    cuda_moe.run(x, logits, w13, w2, out, model, tiles, interpret)
    return out


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def case(tokens: int, size: int, ffn: int, experts: int) -> list[Tensor]:
    return [
        normal(tokens, size),
        normal(tokens, experts, seed=1),
        normal(experts, 2 * ffn, size, seed=2) / size**0.5,
        normal(experts, size, ffn, seed=3) / ffn**0.5,
    ]


def exact(
    x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor, top_k: int, renormalise: bool
) -> Tensor:
    """In float64, token by token; of equal logits the lowest expert."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, scores in enumerate(logits.double()):
        chosen = scores.sort(descending=True, stable=True).indices[:top_k]
        shares = scores.softmax(0)[chosen]
        shares = shares / shares.sum() if renormalise else shares
        for share, expert in zip(shares, chosen.tolist(), strict=True):
            gate, up = (w13[expert].double() @ x[token].double()).chunk(2)
            out[token] += share * (w2[expert].double() @ (gate * gate.sigmoid() * up))
    return out


def assert_near(out: Tensor, expected: Tensor, what: str) -> None:
    """Sums of some hundred terms in float32."""
    limit = 2.0**-18
    worst = float((out.double() - expected).abs().max() / expected.abs().max())
    print(f"{what}: {worst:.1e} of the largest, limit {limit:.1e}")
    assert worst <= limit, what  # NaN fails too


@interpreted
@pytest.mark.parametrize(("tile", "renormalise"), [(SMALL, True), (SWAPPED, False)])
@pytest.mark.parametrize(
    ("tokens", "size", "ffn", "experts", "top_k"),
    [(1, 32, 16, 4, 2), (7, 48, 24, 5, 2), (19, 20, 7, 6, 6), (3, 64, 32, 1, 1)],
)
def test_against_float64(
    tokens: int, size: int, ffn: int, experts: int, top_k: int, renormalise: bool, tile: Tile
) -> None:
    parts = case(tokens, size, ffn, experts)
    out = run(*parts, top_k, renormalise, Tiles(16, tile, tile))
    expected = exact(*parts, top_k, renormalise)
    assert_near(out, expected, "kernels")
    assert_near(reference.moe(*parts, top_k, renormalise), expected, "reference")


@interpreted
def test_an_expert_with_every_token_and_experts_with_none() -> None:
    x, logits, w13, w2 = case(20, 32, 16, 8)
    logits[:, 5] += 100
    logits[:, 2] -= 100
    tiles = Tiles(16, SMALL, SWAPPED)
    out = run(x, logits, w13, w2, 1, True, tiles)
    assert_near(out, exact(x, logits, w13, w2, 1, True), "all on one")
    w13[2] = w2[2] = float("nan")
    assert bool(run(x, logits, w13, w2, 3, True, tiles).isfinite().all())


@interpreted
def test_of_equal_logits_the_lowest_expert_is_chosen() -> None:
    x, logits, w13, w2 = case(12, 32, 16, 8)
    logits = logits.round().clamp(-1, 1)
    logits[0] = 0.0
    logits[1] = torch.tensor([0.0, -0.0] * 4)
    logits[2] = float("-inf")
    logits[2, 6] = 1.0
    out = run(x, logits, w13, w2, 3, True, Tiles(16, SMALL, SMALL))
    assert_near(out, exact(x, logits, w13, w2, 3, True), "ties")
    assert_near(reference.moe(x, logits, w13, w2, 3, True).double(), out.double(), "reference")


@interpreted
def test_a_token_does_not_depend_on_its_mates() -> None:
    x, logits, w13, w2 = case(20, 48, 24, 5)
    """numpy's products round by place; the GPU test asks for the same bits."""
    tiles = Tiles(16, SMALL, SWAPPED)
    whole = run(x, logits, w13, w2, 2, True, tiles).double()
    order = torch.randperm(20, generator=torch.Generator().manual_seed(9))
    mixed = run(x[order], logits[order], w13, w2, 2, True, tiles)
    assert_near(mixed, whole[order], "another order")
    assert_near(run(x[:1], logits[:1], w13, w2, 2, True, tiles), whole[:1], "alone")


@interpreted
def test_logits_that_are_no_numbers_spoil_their_own_token_alone() -> None:
    x, logits, w13, w2 = case(9, 32, 16, 8)
    tiles = Tiles(16, SMALL, SMALL)
    clean = run(x, logits, w13, w2, 3, True, tiles)
    logits[4], logits[6, 1] = float("nan"), float("inf")
    x[7] = float("nan")
    out = run(x, logits, w13, w2, 3, True, tiles)
    fine = [row for row in range(9) if row not in (4, 6, 7)]
    assert torch.equal(out[fine], clean[fine])
    assert bool(out[7].isnan().all())


def test_blocks_suffice_however_entries_are_shared_out() -> None:
    for entries, experts, block_m in ((1, 4, 16), (8, 4, 1), (512, 128, 16), (77, 5, 16)):
        most = cuda_moe.most_blocks(entries, experts, block_m)
        used = min(entries, experts)
        spread = [1] * (used - 1) + [entries - used + 1]
        even = [entries // experts + (index < entries % experts) for index in range(experts)]
        for counts in (spread, even, [entries]):
            assert sum(-(-count // block_m) for count in counts) <= most
