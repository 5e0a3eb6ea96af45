"""Decode attention and the prepare kernel on CUDA.

Tolerance of attention: the weights are rounded to bf16 before they multiply the values, each by
at most 2^-9 of itself, and the result once more: |out - exact| <= 2^-8 max|v| + one rounding.
Errors of many keys average out, so the error's norm stays far below the result's: 1 % is the limit.
"""

from collections.abc import Sequence

import pytest
import torch

from gpu_ops import cuda_ops
from gpu_ops.cuda_decode import (
    DecodeAttention,
    DecodeTuning,
    HeadTransform,
    StepState,
    decode_inputs,
)

Tensor = torch.Tensor
pytestmark = pytest.mark.gpu

NORM_LIMIT = 1e-2
SHAPES = [  # query heads, key-value heads, head_dim
    (16, 8, 128),
    (32, 8, 128),
    (40, 8, 128),
    (64, 8, 128),
    (32, 4, 128),
    (9, 3, 64),
    (7, 1, 128),
    (4, 4, 64),
]
UGLY = [1, 600, 15, 16, 17, 63, 64, 65, 0, 1023, 2, 4000, 257, 1, 33]


class Cache:
    """Paged keys and values of sequences; what no sequence owns is NaN."""

    def __init__(
        self, lengths: Sequence[int], kv_heads: int, head_dim: int, page_size: int, extra: int = 0
    ) -> None:
        device = torch.device("cuda")
        counts = [max(1, -(-(n + extra) // page_size)) for n in lengths]
        pages = sum(counts) + 3
        order = torch.randperm(pages - 1) + 1
        self.page_table = torch.zeros((len(lengths), max(counts)), dtype=torch.int32)
        at = 0
        for row, count in enumerate(counts):
            self.page_table[row, :count] = order[at : at + count]
            at += count
        self.page_table = self.page_table.to(device)
        shape = (pages, page_size, kv_heads, head_dim)
        self.k, self.v = (
            torch.full(shape, float("nan"), dtype=torch.bfloat16, device=device) for _ in range(2)
        )
        self.page_size = page_size
        self.kv_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
        for row, length in enumerate(lengths):
            for cache in (self.k, self.v):
                slots = self.slots(row, length)
                values = torch.randn((length, kv_heads, head_dim), device=device)
                cache.view(-1, kv_heads, head_dim)[slots] = values.to(torch.bfloat16)

    def slots(self, row: int, length: int) -> Tensor:
        token = torch.arange(length, device="cuda")
        page = self.page_table[row].long()[token // self.page_size]
        return page * self.page_size + token % self.page_size

    def exact(self, q: Tensor, scale: float, window: int | None = None) -> Tensor:
        """Attention in float64, one sequence at a time."""
        kv_heads, head_dim = self.k.shape[-2:]
        out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
        for row, length in enumerate(self.kv_lens.tolist()):
            slots = self.slots(row, length)[-window if window else None :]
            k, v = (c.view(-1, kv_heads, head_dim)[slots].double() for c in (self.k, self.v))
            queries = q[row].double().view(kv_heads, -1, head_dim)
            weights = (torch.einsum("hgd,khd->hgk", queries, k) * scale).softmax(-1)
            out[row] = torch.einsum("hgk,khd->hgd", weights, v).reshape(-1, head_dim)
        return out


def assert_attention(out: Tensor, exact: Tensor, what: str) -> None:
    error = (out.double() - exact).flatten(1).norm(dim=1)
    size = exact.flatten(1).norm(dim=1)
    empty = size == 0
    worst = float((error / size)[~empty].max())
    print(f"{what}: error {worst:.2e} of the norm, limit {NORM_LIMIT}")
    assert worst <= NORM_LIMIT, what
    assert not bool(error[empty].any())


def attention(
    cache: Cache, q_heads: int, tuning: DecodeTuning, window: int | None = None
) -> DecodeAttention:
    kv_heads, head_dim = cache.k.shape[-2:]
    return DecodeAttention(
        q_heads, kv_heads, head_dim, cache.page_size, max(64, len(cache.kv_lens)),
        torch.device("cuda"), tuning, window,
    )  # fmt: skip


def check(
    cache: Cache, q_heads: int, tuning: DecodeTuning, what: str, window: int | None = None
) -> None:
    kv_heads, head_dim = cache.k.shape[-2:]
    attend = attention(cache, q_heads, tuning, window)
    q = torch.randn((len(cache.kv_lens), q_heads, head_dim), device="cuda").to(torch.bfloat16)
    scale = head_dim**-0.5
    outs = []
    for _ in range(3):  # counters must be left at 0, and the result must not move
        out = torch.full_like(q, float("nan"))
        attend.plan(cache.kv_lens)
        attend.attend(q, cache.k, cache.v, cache.kv_lens, cache.page_table, scale, out=out)
        outs.append(out)
    torch.cuda.synchronize()
    assert_attention(outs[0], cache.exact(q, scale, window), what)
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])


@pytest.mark.parametrize(("q_heads", "kv_heads", "head_dim"), SHAPES)
@pytest.mark.parametrize("page_size", [16, 64, 256])
def test_ugly_lengths(q_heads: int, kv_heads: int, head_dim: int, page_size: int) -> None:
    cache = Cache(UGLY, kv_heads, head_dim, page_size)
    heads = min(kv_heads, 4) if q_heads // kv_heads > 4 else kv_heads
    check(cache, q_heads, DecodeTuning(heads), f"{q_heads}/{kv_heads} page {page_size}")


@pytest.mark.parametrize(
    "tuning",
    [
        DecodeTuning(1),
        DecodeTuning(1, 4, ring_bytes=100_000),
        DecodeTuning(2, 2, min_tiles=2),
        DecodeTuning(4),
        DecodeTuning(8, min_tiles=4),
    ],
)
@pytest.mark.parametrize("lengths", [[600], [1], [20000, 5], UGLY, [100] * 37])
def test_every_way_to_share_out(tuning: DecodeTuning, lengths: list[int]) -> None:
    check(Cache(lengths, 8, 128, 64), 16, tuning, f"{tuning} {lengths[:3]}")


@pytest.mark.parametrize("window", [1, 16, 100, 5000])
def test_sliding_window(window: int) -> None:
    cache = Cache([n for n in UGLY if n], 8, 128, 16)
    check(cache, 16, DecodeTuning(8), f"window {window}", window)


def test_random_lengths_of_a_full_batch() -> None:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 2000, (256,), generator=generator).tolist()
    check(Cache(lengths, 8, 128, 64), 16, DecodeTuning(8), "256 random lengths")


def test_scores_far_apart() -> None:
    cache = Cache([300, 40], 8, 128, 64)
    cache.k.mul_(30)  # scores of some hundreds: a softmax without its maximum would overflow
    check(cache, 16, DecodeTuning(8), "large scores")


@pytest.mark.parametrize(("q_heads", "kv_heads", "head_dim"), SHAPES)
@pytest.mark.parametrize("normed", [True, False])
def test_norm_rope_and_store_fused_in(
    q_heads: int, kv_heads: int, head_dim: int, normed: bool
) -> None:
    """Against the two kernels apart: the same caches to a rounding, and attention over them."""
    lengths = [n for n in UGLY if n]
    cache = Cache(lengths, kv_heads, head_dim, 64)
    n, device = len(lengths), torch.device("cuda")
    qkv = torch.randn((n, (q_heads + 2 * kv_heads) * head_dim), device=device).to(torch.bfloat16)
    weights = [
        torch.randn(head_dim, device=device).to(torch.bfloat16) if normed else None
        for _ in range(2)
    ]
    angles = torch.rand((4096, head_dim // 2), device=device) * 7
    head = HeadTransform(*weights, 1e-6, torch.cat((angles.cos(), angles.sin()), dim=-1))
    slots = torch.stack([cache.slots(i, m)[-1] for i, m in enumerate(lengths)]).to(torch.int32)
    positions = cache.kv_lens - 1
    apart_k, apart_v = cache.k.clone(), cache.v.clone()
    torch.cuda.synchronize()
    q = cuda_ops.qk_norm_rope_store(
        qkv, *weights, 1e-6, head.cos_sin, positions, slots, apart_k, apart_v
    )
    heads = min(kv_heads, 4) if q_heads // kv_heads > 4 else kv_heads
    for tuning in (DecodeTuning(heads), DecodeTuning(1, ring_bytes=100_000)):
        fused_k, fused_v = cache.k.clone(), cache.v.clone()
        attend = attention(cache, q_heads, tuning)
        attend.plan(cache.kv_lens)
        out = attend.attend_qkv(
            qkv, head, fused_k, fused_v, cache.kv_lens, cache.page_table, head_dim**-0.5
        )
        torch.cuda.synchronize()
        assert torch.equal(fused_v.nan_to_num(7.0), apart_v.nan_to_num(7.0))
        change = (fused_k.float() - apart_k.float()).nan_to_num(0.0).abs()
        assert torch.equal(fused_k.isnan(), apart_k.isnan())
        limit = apart_k.float().nan_to_num(0.0).abs() * 2.0**-6 + 2.0**-6
        print(f"keys differ by {float((change / limit).max()):.3f} of the limit")
        assert bool((change <= limit).all())
        exact_cache = Cache.__new__(Cache)
        exact_cache.__dict__.update(cache.__dict__, k=apart_k, v=apart_v)
        assert_attention(out, exact_cache.exact(q, head_dim**-0.5), f"fused {tuning}")


def test_prepare_and_attend_under_graph_capture() -> None:
    """Three replays of one graph: lengths grow on the device, the plan follows them."""
    device = torch.device("cuda")
    lengths, page_size = [15, 600, 63, 1], 64
    cache = Cache(lengths, 8, 128, page_size, extra=8)
    rows = torch.tensor([2, 0, 1, 3, 4, 4], dtype=torch.int32, device=device)
    dummy = torch.zeros((1, cache.page_table.shape[1]), dtype=torch.int32, device=device)
    state = StepState(
        torch.tensor([*lengths, 0], dtype=torch.int32, device=device),
        torch.tensor([10, 11, 12, 13, 0], dtype=torch.int32, device=device),
        torch.cat((cache.page_table, dummy)),
    )
    cache.k[0], cache.v[0] = 0.0, 0.0
    attend = attention(cache, 16, DecodeTuning(8))
    inputs = decode_inputs(6, device)
    q = torch.randn((6, 16, 128), device=device).to(torch.bfloat16)
    new = torch.randn((2, 6, 8, 128), device=device).to(torch.bfloat16)
    out = torch.empty_like(q)

    def step() -> None:
        attend.prepare(rows, state, inputs)
        for stored, values in zip((cache.k, cache.v), new, strict=True):
            stored.view(-1, 8, 128).index_copy_(0, inputs.slots.long(), values)
        attend.attend(
            q, cache.k, cache.v, inputs.kv_lens, state.page_table, 0.1, rows=rows, out=out
        )

    begun = state.lengths.clone()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    state.lengths.copy_(begun)
    for replay in range(1, 4):
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        order = [2, 0, 1, 3]
        positions = [lengths[row] + replay - 1 for row in order] + [0, 0]
        assert inputs.positions.tolist() == positions
        assert inputs.ids.tolist() == [12, 10, 11, 13, 0, 0]
        assert inputs.kv_lens.tolist() == [p + 1 for p in positions]
        assert state.lengths.tolist() == [n + replay for n in lengths] + [0]
        expected = [
            int(cache.slots(row, p + 1)[-1]) for row, p in zip(order, positions, strict=False)
        ]
        assert inputs.slots.tolist() == expected + [0, 0]
        cache.kv_lens = state.lengths[:4]
        exact = cache.exact(q[[1, 2, 0, 3]], 0.1)
        assert_attention(out[[1, 2, 0, 3]], exact, f"replay {replay}")


def test_shapes_it_does_not_take_are_refused() -> None:
    device = torch.device("cuda")

    def build(q_heads: int, kv_heads: int, head_dim: int, page_size: int, heads: int) -> None:
        tuning = DecodeTuning(heads)
        DecodeAttention(q_heads, kv_heads, head_dim, page_size, 4, device, tuning)

    for arguments in ((18, 2, 128, 64, 2), (9, 8, 128, 64, 8), (8, 8, 96, 64, 8)):
        with pytest.raises(ValueError):
            build(*arguments)
    for arguments in ((16, 8, 128, 48, 8), (16, 8, 128, 64, 3)):
        with pytest.raises(ValueError):
            build(*arguments)
