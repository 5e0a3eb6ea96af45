"""Products of few rows on CUDA, against float64.

Tolerance: operands are bf16 and sums float32, so what remains is one rounding of a normed operand,
2^-9 of each term and averaging out, and one of the result, or two where gate and up are rounded,
2^-9 of each: below 0.8 % of the norm. silu makes a gate's relative error larger where the gate is
negative, by g silu'(g) / silu(g): few outputs may consist of such, so their norm takes it in.
"""

from collections.abc import Callable

import pytest
import torch

from gpu_ops import cuda_linear, cuda_streamed_linear
from gpu_ops.after import After
from gpu_ops.cuda_streamed_linear import StreamTuning
from gpu_ops.unnormed import Unnormed

Tensor = torch.Tensor
pytestmark = pytest.mark.gpu

LIMIT = 8e-3
EPS = 1e-6
SIZES = [(1024, 4096), (2048, 1024), (3072, 1024), (576, 960), (32, 16)]  # of x's rows, outputs
ROWS = [1, 2, 7, 8, 9, 16]


def random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda").to(torch.bfloat16)


def assert_near(out: Tensor, exact: Tensor, what: str, scale: Tensor | None = None) -> None:
    """`scale`: what an error is relative to, element by element, where that is not `exact`."""
    error = float((out.double() - exact).norm() / (exact if scale is None else scale).norm())
    print(f"{what}: {error:.2e} of the norm, limit {LIMIT}")
    assert error <= LIMIT, what  # NaN fails too


def assert_silu_mul_near(out: Tensor, gate: Tensor, up: Tensor, what: str) -> None:
    share = gate.sigmoid()
    exact, slope = gate * share * up, share * (1 + gate * (1 - share))
    assert_near(out, exact, what, torch.maximum(exact.abs(), (gate * slope * up).abs()))


def normed(x: Tensor, norm: Tensor) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * norm.double()


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("size", "outputs"), SIZES)
def test_products(rows: int, size: int, outputs: int) -> None:
    x, norm, weight = 3 * random(rows, size), random(size), random(outputs, size)
    assert cuda_linear.takes(rows, weight)
    exact_x = normed(x, norm)
    exact = exact_x @ weight.double().T
    assert_near(cuda_linear.norm_linear(x, norm, EPS, weight), exact, "norm_linear")
    small = weight / size**0.5  # rounded once more, unless the root is a power of two
    gate, up = (exact_x @ small.double().T).chunk(2, dim=-1)
    out = cuda_linear.norm_linear_silu_mul(x, norm, EPS, small)
    assert_silu_mul_near(out, gate, up, "norm_linear_silu_mul")
    residual = random(rows, outputs)
    exact = residual.double() + x.double() @ weight.double().T
    cuda_linear.linear_add_(x, weight, residual)
    assert_near(residual, exact, "linear_add_")


@pytest.mark.parametrize("rows", [1, 3, 8, 9, 16])
@pytest.mark.parametrize(("size", "outputs"), [(5120, 7168), (5120, 5120), (12288, 4096)])
def test_products_with_large_weights(rows: int, size: int, outputs: int) -> None:
    test_products(rows, size, outputs)


@pytest.mark.parametrize("rows", [1, 16])
def test_the_products_of_an_mlp_of_14b(rows: int) -> None:
    hidden, ffn = 5120, 17408
    x, norm, gate_up = 3 * random(rows, hidden), random(hidden), random(2 * ffn, hidden) / 64
    out = cuda_linear.norm_linear_silu_mul(x, norm, EPS, gate_up)
    gate, up = (normed(x, norm) @ gate_up.double().T).chunk(2, dim=-1)
    assert_silu_mul_near(out, gate, up, "gate_up")
    down, residual = random(hidden, ffn), random(rows, hidden)
    exact = residual.double() + out.double() @ down.double().T
    cuda_linear.linear_add_(out, down, residual)
    assert_near(residual, exact, "down")


STREAM_TUNINGS = [
    StreamTuning(groups, boxes, stages)
    for groups in (1, 5, 7, 16, 34)
    for boxes in (1, 2, 4)
    for stages in (2, 3, 5)
    if boxes * (groups + 2) * stages * 1024 < 220_000 and boxes * groups * stages > 8
]


@pytest.mark.parametrize("tuning", STREAM_TUNINGS, ids=str)
@pytest.mark.parametrize("rows", [2, 11])
def test_every_way_to_stream_a_product(tuning: StreamTuning, rows: int) -> None:
    size, outputs = 768, 1328  # the last block has rows beyond the weight
    x, norm, weight = random(rows, size), random(size), random(outputs, size) / size**0.5
    exact = normed(x, norm) @ weight.double().T
    out = torch.full((rows, outputs), torch.nan, device="cuda", dtype=torch.bfloat16)
    cuda_streamed_linear.launch(x, norm, EPS, weight, out, After.STORE, tuning)
    assert_near(out, exact, "stored")
    residual = random(rows, outputs)
    exact = residual.double() + x.double() @ weight.double().T
    cuda_streamed_linear.launch(x, None, 0.0, weight, residual, After.ADD, tuning)
    assert_near(residual, exact, "added")


def assert_chain(
    run: Callable[[], None], residual: Tensor, begun: Tensor, norm: Tensor, first: Tensor,
    second: Tensor,
) -> None:  # fmt: skip
    """Eight layers are near the exact ones, and a graph's replays equal to them."""
    run()
    torch.cuda.synchronize()
    once = residual.clone()
    exact = begun.double()
    for _ in range(8):
        gate, up = (normed(exact, norm) @ first.double().T).chunk(2, dim=-1)
        exact = exact + (gate * gate.sigmoid() * up) @ second.double().T
    error = float((once.double() - exact).norm() / exact.norm())
    print(f"eight layers: {error:.2e} of the norm")
    assert error < 8 * LIMIT
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(20):
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(residual, once)


@pytest.mark.parametrize("rows", [1, 5, 16])
def test_a_chain_of_streamed_products_under_graph_capture(rows: int) -> None:
    begun, norm = random(rows, 1024), random(1024)
    residual, hidden = begun.clone(), random(rows, 1536)
    first, second = random(3072, 1024) / 32, random(1024, 1536) / 32

    def run() -> None:
        residual.copy_(begun)
        for _ in range(8):
            cuda_streamed_linear.launch(residual, norm, EPS, first, hidden, After.SILU_MUL)
            cuda_streamed_linear.launch(hidden, None, 0.0, second, residual, After.ADD)

    assert_chain(run, residual, begun, norm, first, second)


def test_a_chain_under_graph_capture() -> None:
    """Each kernel reads what the one before wrote: overlap must not show."""
    residual, norm = random(5, 1024), random(1024)
    first, second = random(2048, 1024) / 32, random(1024, 1024) / 32
    begun = residual.clone()

    def run() -> None:
        residual.copy_(begun)
        for _ in range(8):
            hidden = cuda_linear.norm_linear_silu_mul(residual, norm, EPS, first)
            cuda_linear.linear_add_(hidden, second, residual)

    assert_chain(run, residual, begun, norm, first, second)


@pytest.mark.parametrize("rows", [1, 33, 64, 65, 96, 127, 128, 129, 153, 193, 256])
@pytest.mark.parametrize(
    ("size", "outputs"), [(1024, 4096), (2048, 1024), (3072, 1024), (1024, 6144), (64, 64)]
)
def test_products_of_many_rows(rows: int, size: int, outputs: int) -> None:
    x, weight = random(rows, size), random(outputs, size) / size**0.5
    assert cuda_linear.takes_many(rows, weight)
    exact = x.double() @ weight.double().T
    assert_near(cuda_linear.many_linear(x, weight), exact, "many_linear")
    gate, up = exact.chunk(2, dim=-1)
    out = cuda_linear.many_linear_silu_mul(x, weight)
    assert_silu_mul_near(out, gate, up, "many_linear_silu_mul")


@pytest.mark.parametrize("rows", [1, 33, 64, 129, 200, 256])
@pytest.mark.parametrize(("size", "outputs"), [(2048, 1024), (3072, 1024), (64, 64)])
def test_a_norm_shared_out_between_two_products(rows: int, size: int, outputs: int) -> None:
    x, weight, norm = random(rows, size), random(outputs, size) / size**0.5, random(outputs)
    residual, second = 3 * random(rows, outputs), random(512, outputs) / outputs**0.5
    exact = residual.double() + x.double() @ weight.double().T
    half_done = cuda_linear.many_linear_add_(x, weight, residual, norm, EPS)
    assert_near(residual, exact, "the residual")
    squares = residual.double().square().sum(-1)
    assert_near(half_done.squares.sum(0), squares, "its squares")
    exact = normed(residual, norm) @ second.double().T
    assert_near(cuda_linear.many_linear(half_done, second), exact, "many_linear")
    out = cuda_linear.many_linear_silu_mul(half_done, second)
    assert_silu_mul_near(out, *exact.chunk(2, dim=-1), "many_linear_silu_mul")


@pytest.mark.parametrize("columns", [32, 64, 96, 128, 160, 192])
@pytest.mark.parametrize("splits", [1, 2, 4, 8])
@pytest.mark.parametrize("stages", [3, 4])
def test_every_way_to_cut_a_product_up(columns: int, splits: int, stages: int) -> None:
    x, weight = random(200, 1024), random(1024, 1024) / 32
    tuning = cuda_linear.ManyTuning(columns, splits, stages)
    exact = x.double() @ weight.double().T
    for _ in range(3):
        assert_near(cuda_linear.many_linear(x, weight, tuning), exact, f"{tuning}")


def test_a_chain_of_many_rows_under_graph_capture() -> None:
    x, first, second = random(150, 1024), random(6144, 1024) / 32, random(1024, 3072) / 16
    norm, outs = random(1024), list[Tensor]()

    def run() -> None:
        residual = x.clone()
        y: Tensor | Unnormed = x
        for _ in range(6):
            active = cuda_linear.many_linear_silu_mul(y, first)
            y = cuda_linear.many_linear_add_(active, second, residual, norm, EPS)
        outs[:] = [cuda_linear.many_linear(y, first), residual]

    run()
    torch.cuda.synchronize()
    once = [out.clone() for out in outs]
    assert all(bool(out.isfinite().all()) for out in once)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(20):
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert all(map(torch.equal, outs, once))


def test_what_it_does_not_take() -> None:
    weight = random(64, 64)
    assert not cuda_linear.takes(17, weight) and not cuda_linear.takes(0, weight)
    assert not cuda_linear.takes(1, random(24, 64)) and not cuda_linear.takes(1, random(64, 40))
    assert not cuda_linear.takes(1, weight.float())
    too_large = torch.empty((66 * 1024, 12288), dtype=torch.bfloat16, device="cuda")
    assert not cuda_linear.takes(1, too_large)  # too many rows to a block
    assert not cuda_linear.takes_many(257, weight)
    assert not cuda_linear.takes_many(64, random(32, 64))
    assert not cuda_linear.takes_many(64, random(64, 96))
