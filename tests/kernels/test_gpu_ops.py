"""The small CUDA kernels against the reference in float32, on sizes nobody would choose.

Tolerance: both sides compute in float32 and round once, so a bf16 result may differ by one unit in
the last place, 2^-7 of its size at most; of float32, rsqrt and exp are good to about 2^-21.
"""

import pytest
import torch

from gpu_ops import reference

Tensor = torch.Tensor
pytestmark = pytest.mark.gpu

EPS = 1e-6
DTYPES = (torch.bfloat16, torch.float32)
RELATIVE = {torch.bfloat16: 2.0**-7, torch.float32: 2.0**-18}


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def assert_close(out: Tensor, expected: Tensor, what: str) -> None:
    tolerance = RELATIVE[out.dtype]
    assert out.shape == expected.shape and out.dtype == expected.dtype
    difference = (out.double() - expected.double()).abs()
    allowed = tolerance * expected.double().abs() + tolerance * 1e-2
    worst = float((difference / allowed).max()) if out.numel() else 0.0
    print(f"{what}: {worst:.3f} of the tolerance")
    assert worst <= 1.0, what  # NaN fails too


def captured(run) -> None:  # type: ignore[no-untyped-def]
    """Runs `run` once under capture, then replays it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    torch.cuda.synchronize()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 3, 257])
@pytest.mark.parametrize("size", [8, 64, 576, 1000, 1024, 5120, 8192, 16384])
def test_norms(dtype: torch.dtype, rows: int, size: int) -> None:
    from gpu_ops import cuda_ops

    x, weight = random(rows, size, dtype=dtype), random(size, dtype=dtype)
    assert_close(cuda_ops.rms_norm(x, weight, EPS), reference.rms_norm(x, weight, EPS), "rms_norm")
    residual = random(rows, size, dtype=dtype)
    sums = residual.clone()
    out = cuda_ops.add_rms_norm_(x, residual, weight, EPS)
    assert_close(out, reference.add_rms_norm_(x, sums, weight, EPS), "add_rms_norm_")
    assert torch.equal(residual, sums)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", [1, 2, 3, 4, 7, 17])
@pytest.mark.parametrize(("rows", "size"), [(0, 8), (1, 5120), (3, 1000), (257, 576), (2, 16384)])
def test_norm_of_a_sum_in_parts(dtype: torch.dtype, parts: int, rows: int, size: int) -> None:
    from gpu_ops import cuda_ops

    x, weight = random(parts, rows, size, dtype=torch.float32), random(size, dtype=dtype)
    residual = random(rows, size, dtype=dtype)
    whole = torch.zeros((rows, size), device="cuda")
    for part in x:  # in order, as the kernel does
        whole += part
    sums = residual.clone()
    out = cuda_ops.add_parts_rms_norm_(x, residual, weight, EPS)
    expected = reference.add_rms_norm_(whole.to(dtype), sums, weight, EPS)
    assert torch.equal(residual, sums)
    assert_close(out, expected, f"{parts} parts")


@pytest.mark.parametrize("rows", [1, 17, 256])
@pytest.mark.parametrize("parts", [1, 2, 4, 8])
def test_a_product_in_parts(rows: int, parts: int) -> None:
    from gpu_ops import cuda_split_linear

    x, weight, norm = random(rows, 1024), random(512, 1024) / 32, random(512)
    residual = random(rows, 512)
    sums = residual.double() + x.double() @ weight.double().T
    out = cuda_split_linear.linear_add_rms_norm_(x, weight, residual, norm, EPS, parts)
    # The product is rounded, then its sum with the residual: two roundings of 2^-9 of their sizes.
    error = float((residual.double() - sums).norm() / sums.norm())
    print(f"{error:.2e} of the norm")
    assert error <= 2**-8
    assert_close(out, reference.rms_norm(residual, norm, EPS), "normed")


def test_a_product_is_not_cut_within_a_group() -> None:
    from gpu_ops import cuda_split_linear

    with pytest.raises(ValueError, match="3 parts"):
        cuda_split_linear.linear_in_parts(random(2, 64), random(64, 64), 3)


def test_norm_of_rows_that_lie_apart_and_of_heads() -> None:
    from gpu_ops import cuda_ops

    wide, weight = random(5, 3, 256), random(64)
    x = wide[:, 1, 64:128]
    assert_close(
        cuda_ops.rms_norm(x, weight, EPS), reference.rms_norm(x, weight, EPS), "strided rows"
    )
    heads = random(5, 3, 64)
    assert_close(
        cuda_ops.rms_norm(heads, weight, EPS), reference.rms_norm(heads, weight, EPS), "heads"
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 130])
def test_embedding_and_norm(dtype: torch.dtype, rows: int) -> None:
    from gpu_ops import cuda_ops

    table, weight = random(1000, 576, dtype=dtype), random(576, dtype=dtype)
    ids = torch.randint(0, 1000, (rows,), device="cuda", dtype=torch.int32)
    residual, out = cuda_ops.embed_rms_norm(ids, table, weight, EPS)
    assert torch.equal(residual, table[ids.long()])
    assert_close(out, reference.rms_norm(residual, weight, EPS), "embed_rms_norm")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(0, 8), (1, 8), (3, 1536), (257, 3072), (33, 17408)])
def test_silu_mul(dtype: torch.dtype, rows: int, size: int) -> None:
    from gpu_ops import cuda_ops

    gate_up = 4 * random(rows, 2 * size, dtype=dtype)
    assert_close(cuda_ops.silu_mul(gate_up), reference.silu_mul(gate_up), "silu_mul")


def test_silu_mul_of_extreme_gates() -> None:
    from gpu_ops import cuda_ops

    gate = torch.tensor([-3e38, -200.0, -88.0, -1e-30, 0.0, 88.0, 200.0, 1e30], device="cuda")
    gate_up = torch.cat((gate, torch.ones_like(gate)))[None].to(torch.bfloat16)
    assert_close(cuda_ops.silu_mul(gate_up), reference.silu_mul(gate_up), "extreme gates")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "head_dim"), [(16, 8, 128), (9, 3, 64), (7, 1, 256)]
)
@pytest.mark.parametrize("tokens", [1, 5, 131])
@pytest.mark.parametrize("normed", [True, False])
def test_qk_norm_rope_store(
    dtype: torch.dtype, q_heads: int, kv_heads: int, head_dim: int, tokens: int, normed: bool
) -> None:
    from gpu_ops import cuda_ops

    pages, page_size = 40, 16
    qkv = random(tokens, (q_heads + 2 * kv_heads) * head_dim, dtype=dtype)
    weights = [random(head_dim, dtype=dtype) if normed else None for _ in range(2)]
    angles = torch.rand(4096, head_dim // 2, device="cuda") * 7
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    positions = torch.randint(0, 4096, (tokens,), device="cuda", dtype=torch.int32)
    slots = torch.randperm(pages * page_size, device="cuda")[:tokens].to(torch.int32)
    caches = [random(pages, page_size, kv_heads, head_dim, dtype=dtype) for _ in range(2)]
    expected_caches = [cache.clone() for cache in caches]
    torch.cuda.synchronize()
    q = cuda_ops.qk_norm_rope_store(qkv, *weights, EPS, cos_sin, positions, slots, *caches)
    expected = reference.qk_norm_rope_store(
        qkv, *weights, EPS, cos_sin, positions, slots, *expected_caches
    )
    # A normed head is rounded before it turns: one unit there moves two products, by 2^-7 of
    # either; where they cancel, the rest is small against that.
    scale = 2.0**-6 if normed and dtype == torch.bfloat16 else RELATIVE[dtype]
    for out, wanted in ((q, expected), (caches[0], expected_caches[0])):
        worst = float((out.double() - wanted.double()).abs().max() / wanted.double().abs().max())
        print(f"largest difference {worst:.2e} of the largest value")
        assert worst <= scale
    assert torch.equal(caches[1], expected_caches[1])


def test_kernels_under_graph_capture() -> None:
    from gpu_ops import cuda_ops

    x, residual, weight = random(33, 1024), random(33, 1024), random(1024)
    gate_up = random(33, 2048)
    begun = residual.clone()
    outs: list[Tensor] = []

    def run() -> None:
        residual.copy_(begun)
        hidden = cuda_ops.add_rms_norm_(x, residual, weight, EPS)
        outs[:] = [hidden, cuda_ops.silu_mul(gate_up), cuda_ops.rms_norm(hidden, weight, EPS)]

    captured(run)
    hidden = reference.add_rms_norm_(x, begun.clone(), weight, EPS)
    assert_close(outs[0], hidden, "add_rms_norm_")
    assert_close(outs[1], reference.silu_mul(gate_up), "silu_mul")
    assert_close(outs[2], reference.rms_norm(outs[0], weight, EPS), "a chain of two")


def test_what_the_kernels_do_not_take_is_refused() -> None:
    from gpu_ops import cuda_ops

    with pytest.raises(TypeError, match="float16"):
        cuda_ops.silu_mul(random(2, 16, dtype=torch.float16))
    with pytest.raises(ValueError, match="multiple of 8"):
        cuda_ops.rms_norm(random(2, 12), random(12), EPS)
    with pytest.raises(ValueError, match="head_dim is 96"):
        caches = [random(2, 16, 1, 96) for _ in range(2)]
        ints = torch.zeros(2, device="cuda", dtype=torch.int32)
        cos_sin = torch.zeros(8, 96, device="cuda")
        cuda_ops.qk_norm_rope_store(random(2, 288), None, None, EPS, cos_sin, ints, ints, *caches)
