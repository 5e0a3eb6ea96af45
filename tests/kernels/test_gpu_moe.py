"""`ops.moe` on a GPU: bf16, graphs, ugly sizes, and the same bits whoever shares the batch.

Tolerance: three roundings to bfloat16 of 2^-9 each (gate times up, each expert's weighted output,
their sum), of the norm; in float32 sums of some thousand terms.
"""

import pytest
import torch

from gpu_ops import ops, reference

Tensor = torch.Tensor
pytestmark = pytest.mark.gpu

LIMIT = {torch.bfloat16: 3 * 2.0**-9, torch.float32: 2.0**-18}
A3B = (2048, 768, 128, 8)
UGLY = [(48, 24, 5, 2), (20, 7, 6, 6), (576, 100, 33, 3), (64, 32, 1, 1), (1000, 136, 200, 9)]


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def weights(
    size: int, ffn: int, experts: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor]:
    w13 = random(experts, 2 * ffn, size, dtype=dtype) / size**0.5
    return w13, random(experts, size, ffn, dtype=dtype) / ffn**0.5


def exact(
    x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor, top_k: int, renormalise: bool
) -> Tensor:
    """The reference in float64, but for the weights, which it takes from float32."""
    parts = (part.double() for part in (x, logits, w13, w2))
    return reference.moe(*parts, top_k, renormalise)


def assert_near(out: Tensor, expected: Tensor, what: str) -> None:
    error = float((out.double() - expected).norm() / expected.norm())
    print(f"{what}: error {error:.1e} of the norm, limit {LIMIT[out.dtype]:.1e}")
    assert error <= LIMIT[out.dtype], what  # NaN fails too


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("shape", UGLY)
@pytest.mark.parametrize("tokens", [1, 17, 300])
def test_ugly_sizes(
    shape: tuple[int, int, int, int], tokens: int, renormalise: bool, dtype: torch.dtype
) -> None:
    size, ffn, experts, top_k = shape
    w13, w2 = weights(size, ffn, experts, dtype)
    assert ops.prepare_moe(w13, top_k, renormalise)
    x, logits = random(tokens, size, dtype=dtype), random(tokens, experts, dtype=dtype)
    out = ops.moe(x, logits, w13, w2, top_k, renormalise)
    assert_near(out, exact(x, logits, w13, w2, top_k, renormalise), f"{tokens} x {shape}")


@pytest.fixture(scope="module")
def a3b() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return weights(*A3B[:3])


@pytest.mark.parametrize("tokens", [1, 2, 31, 64, 129, 256, 1000, 5000])
def test_the_shape_of_30b_a3b(tokens: int, a3b: tuple[Tensor, Tensor]) -> None:
    x, logits = random(tokens, 2048), random(tokens, 128)
    out = ops.moe(x, logits, *a3b, 8, True)
    assert_near(out, exact(x, logits, *a3b, 8, True), f"{tokens} tokens")


def test_more_tokens_than_one_pass_takes() -> None:
    w13, w2 = weights(64, 32, 8)
    x, logits = random(40_000, 64), random(40_000, 8)
    out = ops.moe(x, logits, w13, w2, 2, True)
    assert_near(out, exact(x, logits, w13, w2, 2, True), "40,000 tokens")
    assert ops.moe(x[:0], logits[:0], w13, w2, 2, True).shape == (0, 64)


@pytest.mark.parametrize("tokens", [3, 200])
def test_one_expert_has_every_token(tokens: int, a3b: tuple[Tensor, Tensor]) -> None:
    x, logits = random(tokens, 2048), random(tokens, 128)
    logits[:, :8] += 200
    out = ops.moe(x, logits, *a3b, 8, True)
    assert_near(out, exact(x, logits, *a3b, 8, True), "eight experts have all")


def test_equal_logits_go_to_the_lowest_experts(a3b: tuple[Tensor, Tensor]) -> None:
    x, logits = random(40, 2048), random(40, 128).round()
    logits[0], logits[1] = 0.0, -logits[1].abs() * 0.0
    logits[2] = float("-inf")
    logits[2, 100:108] = 1.0
    out = ops.moe(x, logits, *a3b, 8, True)
    assert_near(out, exact(x, logits, *a3b, 8, True), "ties")


def test_the_same_bits_in_any_order_and_beside_anybody(a3b: tuple[Tensor, Tensor]) -> None:
    x, logits = random(64, 2048), random(64, 128)
    whole = ops.moe(x, logits, *a3b, 8, True)
    assert torch.equal(ops.moe(x, logits, *a3b, 8, True), whole)
    order = torch.randperm(64, device="cuda")
    assert torch.equal(ops.moe(x[order], logits[order], *a3b, 8, True), whole[order])
    mates, others = random(64, 2048), random(64, 128)
    mates[7], others[7] = x[7], logits[7]
    mates[9], others[9] = float("nan"), float("nan")
    assert torch.equal(ops.moe(mates, others, *a3b, 8, True)[7], whole[7])


@pytest.mark.parametrize("tokens", [1, 64, 200])
def test_a_graph_follows_its_inputs(tokens: int, a3b: tuple[Tensor, Tensor]) -> None:
    x, logits = random(tokens, 2048), random(tokens, 128)
    assert ops.prepare_moe(a3b[0], 8, True)
    ops.moe(x, logits, *a3b, 8, True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first = ops.moe(x, logits, *a3b, 8, True)
        second = ops.moe(first, logits, *a3b, 8, True)
    for replay in range(12):
        x.copy_(random(tokens, 2048))
        logits.copy_(random(tokens, 128))
        if replay % 3 == 2:
            logits[:, :8] += 100  # many blocks of few experts, after few of many
        graph.replay()
        torch.cuda.synchronize()
        once = ops.moe(x, logits, *a3b, 8, True)
        assert torch.equal(first, once)
        assert torch.equal(second, ops.moe(once, logits, *a3b, 8, True))


def test_what_no_kernel_takes_goes_to_the_reference(caplog: pytest.LogCaptureFixture) -> None:
    w13, w2 = (part.to(torch.float16) for part in weights(32, 16, 4))
    x, logits = random(5, 32).half(), random(5, 4).half()
    assert not ops.prepare_moe(w13, 2, True)
    for _ in range(3):
        out = ops.moe(x, logits, w13, w2, 2, True)
    assert torch.equal(out, reference.moe(x, logits, w13, w2, 2, True))
    assert [record.message for record in caplog.records if "no kernel" in record.message] == [
        "experts [4, 32, 32] in torch.float16, 2 active: no kernel takes them; torch computes "
        "them, slowly and without graphs"
    ]
