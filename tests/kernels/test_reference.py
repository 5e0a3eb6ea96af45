"""The torch reference of each operation against the plainest possible statement of it.

The CPU's attention is tested against the reference here too; CUDA kernels have tests of their own.
"""

import math

import pytest
import torch

from gpu_ops import cpu_attention, cpu_linear, ops, reference
from gpu_ops.batch import AttentionBatch
from gpu_ops.cpu_attention import CpuPlan, plan_attention

Tensor = torch.Tensor


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed))


@pytest.mark.parametrize("shape", [(1, 7), (3, 64), (2, 5, 33)])
def test_rms_norm(shape: tuple[int, ...]) -> None:
    x, weight = normal(*shape), normal(shape[-1], seed=1)
    exact = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    assert (ops.rms_norm(x, weight, 1e-5) - exact).abs().max() < 1e-5 * exact.abs().max()


def test_add_rms_norm_updates_the_residual() -> None:
    x, residual, weight = normal(3, 16), normal(3, 16, seed=1), normal(16, seed=2)
    total = x + residual
    assert torch.equal(
        ops.add_rms_norm_(x, residual, weight, 1e-6), ops.rms_norm(total, weight, 1e-6)
    )
    assert torch.equal(residual, total)


def test_linear_add_rms_norm_updates_the_residual() -> None:
    x, weight = normal(3, 8), normal(16, 8, seed=3)
    residual, norm = normal(3, 16, seed=1), normal(16, seed=2)
    total = residual + x @ weight.T
    out = ops.linear_add_rms_norm_(x, weight, residual, norm, 1e-6)
    assert torch.equal(out, ops.rms_norm(residual, norm, 1e-6))
    assert (residual - total).abs().max() < 8 * 2**-22 * total.abs().max()


def test_silu_mul() -> None:
    gate_up = normal(3, 14)
    gate, up = gate_up[:, :7].double(), gate_up[:, 7:].double()
    exact = gate / (1 + (-gate).exp()) * up
    assert (ops.silu_mul(gate_up) - exact).abs().max() < 1e-6


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("bias", [False, True])
def test_packed_linear_equals_plain(rows: int, bias: bool) -> None:
    if not cpu_linear.can_pack(torch.float32):
        pytest.skip("this torch has no oneDNN")
    x, weight = normal(rows, 33), normal(17, 33, seed=1)
    b = normal(17, seed=2) if bias else None
    packed = cpu_linear.pack(weight)
    difference = (ops.linear(x, packed, b) - ops.linear(x, weight, b)).abs().max()
    assert difference < 33 * 2**-23 * 10  # sums of 33 products of size up to 10, in another order


@pytest.mark.parametrize("with_norm", [False, True])
def test_qk_norm_rope_store(with_norm: bool) -> None:
    heads, kv_heads, d, tokens = 4, 2, 8, 3
    qkv = normal(tokens, (heads + 2 * kv_heads) * d)
    q_weight, k_weight = (normal(d, seed=1), normal(d, seed=2)) if with_norm else (None, None)
    angles = normal(20, d // 2, seed=3)
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1)
    positions = torch.tensor([4, 0, 19], dtype=torch.int32)
    slots = torch.tensor([13, 2, 7], dtype=torch.int32)
    k_cache, v_cache = torch.zeros(4, 4, kv_heads, d), torch.zeros(4, 4, kv_heads, d)
    before = qkv.clone()
    q = ops.qk_norm_rope_store(
        qkv, q_weight, k_weight, 1e-6, cos_sin, positions, slots, k_cache, v_cache
    )
    assert torch.equal(qkv, before)
    for token in range(tokens):
        vectors = before[token].view(-1, d)
        turn = angles[positions[token]].repeat(2)
        for head in range(heads + kv_heads):
            x = vectors[head]
            weight = q_weight if head < heads else k_weight
            if weight is not None:
                x = reference.rms_norm(x, weight, 1e-6)
            crossed = torch.cat((-x[d // 2 :], x[: d // 2]))
            expected = x * turn.cos() + crossed * turn.sin()
            page, offset = divmod(int(slots[token]), 4)
            found = q[token, head] if head < heads else k_cache[page, offset, head - heads]
            assert torch.allclose(found, expected, rtol=0, atol=1e-6)
        assert torch.equal(v_cache[page, offset], vectors[heads + kv_heads :])
    written = k_cache.abs().sum((2, 3)).count_nonzero()
    assert written == tokens


def paged(
    sequences: list[tuple[int, int]], page_size: int, prefills: int, kv_heads: int, d: int
) -> tuple[Tensor, Tensor, AttentionBatch, list[tuple[Tensor, Tensor]]]:
    """Caches filled at random pages for (queries, keys) sequences, and each one's dense k and v."""
    counts = [-(-keys // page_size) for _, keys in sequences]
    pages = 1 + torch.randperm(sum(counts), generator=generator(1)).to(torch.int32)
    k_cache = normal(1 + sum(counts), page_size, kv_heads, d, seed=2)
    v_cache = normal(1 + sum(counts), page_size, kv_heads, d, seed=3)
    table = torch.zeros(len(sequences), max(counts), dtype=torch.int32)
    dense = []
    for i, (count, own) in enumerate(zip(counts, pages.split(counts), strict=True)):
        table[i, :count] = own
        dense.append(
            tuple(c[own.long()].flatten(0, 1)[: sequences[i][1]] for c in (k_cache, v_cache))
        )
    bounds = torch.tensor([0] + [queries for queries, _ in sequences]).cumsum(0)
    batch = AttentionBatch(
        q_indptr=bounds.to(torch.int32),
        kv_lens=torch.tensor([keys for _, keys in sequences], dtype=torch.int32),
        page_table=table,
        prefills=prefills,
        decodes=len(sequences) - prefills,
    )
    return k_cache, v_cache, batch, dense  # type: ignore[return-value]


def dense_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
    """One query and one head at a time, in float64."""
    out = torch.empty_like(q, dtype=torch.float64)
    group = q.shape[1] // k.shape[1]
    for i in range(len(q)):
        last = len(k) - len(q) + i
        first = 0 if window is None else max(0, last - window + 1)
        for head in range(q.shape[1]):
            keys = k[first : last + 1, head // group].double()
            weights = (keys @ q[i, head].double() * scale).softmax(0)
            out[i, head] = weights @ v[first : last + 1, head // group].double()
    return out


ATTENTION_CASES = [
    pytest.param([(5, 5)], 1, id="one whole prompt"),
    pytest.param([(3, 9)], 1, id="one chunk after others"),
    pytest.param([(1, 1)], 0, id="first token alone"),
    pytest.param([(1, 9), (1, 9)], 0, id="equal lengths"),
    pytest.param([(1, 3), (1, 17), (1, 8)], 0, id="unequal lengths"),
    pytest.param([(1, 2), (1, 400), (1, 3), (1, 290), (1, 280)], 0, id="very unequal lengths"),
    pytest.param([(4, 4), (1, 6), (2, 30), (1, 12), (1, 200)], 3, id="mixed"),
]


@pytest.mark.parametrize(("sequences", "prefills"), ATTENTION_CASES)
@pytest.mark.parametrize("page_size", [1, 4, 64])
@pytest.mark.parametrize("window", [None, 1, 5, 1000])
@pytest.mark.parametrize("planned", [False, True])
def test_paged_attention(
    sequences: list[tuple[int, int]],
    prefills: int,
    page_size: int,
    window: int | None,
    planned: bool,
) -> None:
    kv_heads, d = 2, 8
    k_cache, v_cache, batch, dense = paged(sequences, page_size, prefills, kv_heads, d)
    scale = 1 / math.sqrt(d)
    # Heads contiguous, tokens not: as qk_norm_rope_store returns it.
    q = normal(int(batch.q_indptr[-1]), 8, d)[:, :6]
    expected = torch.cat(
        [
            dense_attention(q[start:end], k, v, scale, window)
            for (k, v), start, end in zip(dense, batch.q_indptr, batch.q_indptr[1:], strict=False)
        ]
    )
    plain = reference.paged_attention(q, k_cache, v_cache, batch, scale, window)
    if planned:
        batch = plan_attention(batch, k_cache, {None, window})
    fast = ops.paged_attention(q, k_cache, v_cache, batch, scale, window)
    # 400 products of size up to 10 in float32: 400 * 10 * 2^-24 at the very worst.
    assert (plain - expected).abs().max() < 2.4e-4
    assert (fast - expected).abs().max() < 2.4e-4


def test_what_lies_past_a_sequence_does_not_matter() -> None:
    """Padding pages may hold another request's keys, and its values may be huge."""
    k_cache, v_cache, batch, _ = paged([(1, 5), (1, 3)], 4, 0, 2, 8)
    q = normal(2, 4, 8)
    before = ops.paged_attention(q, k_cache, v_cache, batch, 0.3)
    k_cache[int(batch.page_table[1, 0]), 3:] = 1e30
    v_cache[int(batch.page_table[1, 0]), 3:] = -1e30
    v_cache[0] = 1e30
    assert torch.equal(ops.paged_attention(q, k_cache, v_cache, batch, 0.3), before)


@pytest.mark.parametrize("renormalise", [False, True])
def test_moe(renormalise: bool) -> None:
    tokens, experts, size, ffn, top_k = 6, 5, 12, 7, 2
    x, logits = normal(tokens, size), normal(tokens, experts, seed=1)
    logits[:, 3] = -50.0  # nobody's choice
    w13, w2 = normal(experts, 2 * ffn, size, seed=2), normal(experts, size, ffn, seed=3)
    out = ops.moe(x, logits, w13, w2, top_k, renormalise)
    for token in range(tokens):
        weights = logits[token].double().softmax(0)
        chosen = weights.argsort(descending=True)[:top_k].tolist()
        total = sum(weights[e] for e in chosen) if renormalise else 1.0
        expected = torch.zeros(size, dtype=torch.float64)
        for e in chosen:
            gate_up = w13[e].double() @ x[token].double()
            gate, up = gate_up[:ffn], gate_up[ffn:]
            expected += weights[e] / total * (w2[e].double() @ (gate * gate.sigmoid() * up))
        assert torch.allclose(out[token].double(), expected, rtol=1e-4, atol=1e-4)


def test_large_gathers_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """No call gathers more than its bound, but for a single sequence that exceeds it alone."""
    monkeypatch.setattr(cpu_attention, "_GATHERED_VALUES", 2 * 8 * 20)  # 20 keys
    k_cache, v_cache, batch, _ = paged([(1, n) for n in (9, 8, 30, 7, 3, 3, 3)], 4, 0, 2, 8)
    q = normal(7, 4, 8)
    planned = plan_attention(batch, k_cache, {None})
    assert isinstance(planned.plan, CpuPlan)
    assert [call.keys for call in planned.plan.calls] == [9, 30, 7, 3]
    expected = reference.paged_attention(q, k_cache, v_cache, batch, 0.3)
    found = ops.paged_attention(q, k_cache, v_cache, planned, 0.3)
    assert (found - expected).abs().max() < 1e-5


@pytest.mark.parametrize("window", [None, 1, 3, 6, 40])
@pytest.mark.parametrize(("part", "mask"), [(4, 1 << 20), (100, 60), (100, 1)])
def test_a_prefill_in_parts_is_one_in_a_whole(
    window: int | None, part: int, mask: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of 4 queries, of as many as a mask of 60 values has, and of one."""
    monkeypatch.setattr(cpu_attention, "_PART_QUERIES", part)
    monkeypatch.setattr(cpu_attention, "_MASK_VALUES", mask)
    k_cache, v_cache, batch, _ = paged([(11, 18), (9, 30), (7, 7), (1, 5)], 4, 3, 2, 8)
    q = normal(28, 4, 8)
    found = ops.paged_attention(q, k_cache, v_cache, batch, 0.3, window)
    expected = reference.paged_attention(q, k_cache, v_cache, batch, 0.3, window)
    assert (found - expected).abs().max() < 1e-5


@pytest.mark.parametrize("window", [None, 4096])
def test_a_long_context_does_not_make_a_large_mask(window: int | None) -> None:
    """2,048 queries after 129,024 tokens: once 1 GiB."""
    queries, keys = 2048, 131_072
    batch = AttentionBatch(
        q_indptr=torch.tensor([0, queries], dtype=torch.int32),
        kv_lens=torch.tensor([keys], dtype=torch.int32),
        page_table=torch.zeros(1, keys // 64, dtype=torch.int32),
        prefills=1,
        decodes=0,
    )
    plan = plan_attention(batch, torch.empty(1, 64, 1, 8), {window}).plan
    assert isinstance(plan, CpuPlan)
    (call,) = plan.calls
    mask = call.masks[window]
    assert mask is not None and mask.nbytes <= 64 << 20
