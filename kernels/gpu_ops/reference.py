"""What each operation computes, in plain torch on any device: what the kernels are tested against.

The CPU runs these too, but for attention (`cpu_attention.py`) and sampling (`sampling.py`).
Everything is computed in float32 and rounded once at the end.
"""

import torch
import torch.nn.functional as F

from gpu_ops.batch import AttentionBatch

Tensor = torch.Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As `ops.linear`."""
    return F.linear(x, weight, bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `ops.rms_norm`."""
    return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)


def add_rms_norm_(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `ops.add_rms_norm_`."""
    residual.add_(x)
    return rms_norm(residual, weight, eps)


def silu_mul(gate_up: Tensor) -> Tensor:
    """As `ops.silu_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate.float()).mul_(up.float()).to(gate_up.dtype)


def qk_norm_rope_store(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
) -> Tensor:
    """As `ops.qk_norm_rope_store`."""
    tokens = qkv.shape[0]
    kv_heads, head_dim = k_cache.shape[-2:]
    heads = qkv.view(tokens, -1, head_dim)
    q_heads = heads.shape[1] - 2 * kv_heads
    if q_weight is not None and k_weight is not None:
        q = rms_norm(heads[:, :q_heads], q_weight, eps)
        k = rms_norm(heads[:, q_heads : q_heads + kv_heads], k_weight, eps)
        qk = torch.cat((q, k), dim=1)
    else:
        qk = heads[:, : q_heads + kv_heads]
    qk = _rotate(qk, cos_sin.index_select(0, positions)).to(qkv.dtype)
    where = slots.long()
    k_cache.view(-1, kv_heads, head_dim).index_copy_(0, where, qk[:, q_heads:])
    v_cache.view(-1, kv_heads, head_dim).index_copy_(0, where, heads[:, q_heads + kv_heads :])
    return qk[:, :q_heads]


def _rotate(qk: Tensor, cos_sin: Tensor) -> Tensor:
    """[n, h, d] float32: each pair (x[i], x[i + d/2]) turned by its angle. `cos_sin` is [n, d]."""
    tokens, heads, head_dim = qk.shape
    pairs = qk.float().view(tokens, heads, 2, head_dim // 2)
    cos, sin = cos_sin.view(tokens, 1, 2, head_dim // 2).unbind(2)
    turned = pairs * cos[:, :, None]
    first, second = pairs.unbind(2)
    turned_first, turned_second = turned.unbind(2)
    turned_first.addcmul_(second, sin, value=-1)
    turned_second.addcmul_(first, sin)
    return turned.view(tokens, heads, head_dim)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: AttentionBatch,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """As `ops.paged_attention`: one sequence at a time, with the whole score matrix."""
    kv_heads, head_dim = k_cache.shape[-2:]
    group = q.shape[1] // kv_heads
    out = torch.empty_like(q)
    bounds = batch.q_indptr.tolist()
    for sequence, kv_len in enumerate(batch.kv_lens.tolist()):
        start, end = bounds[sequence], bounds[sequence + 1]
        pages = batch.page_table[sequence].long()[: -(-kv_len // k_cache.shape[1])]
        k = k_cache[pages].reshape(-1, kv_heads, head_dim)[:kv_len].float()
        v = v_cache[pages].reshape(-1, kv_heads, head_dim)[:kv_len].float()
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q[start:end].float(), k) * scale
        seen = visible(end - start, kv_len, window, q.device)
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        out[start:end] = torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)
    return out


def visible(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """[queries, keys] bool: which keys a query sees; the last query is the last key."""
    key = torch.arange(keys, device=device)
    query = torch.arange(keys - queries, keys, device=device)[:, None]
    seen = key <= query
    return seen if window is None else seen & (key > query - window)


def moe(
    x: Tensor, router_logits: Tensor, w13: Tensor, w2: Tensor, top_k: int, renormalise: bool
) -> Tensor:
    """As `ops.moe`: one expert at a time, those without tokens left out."""
    scores = router_logits.float()
    chosen = scores.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.softmax(-1).gather(-1, chosen)
    if renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    results = x.new_empty((len(x), top_k, x.shape[1]))
    used = torch.bincount(chosen.flatten(), minlength=len(w13)).nonzero()[:, 0]
    for expert in used.tolist():
        tokens, rank = (chosen == expert).nonzero(as_tuple=True)
        hidden = silu_mul(F.linear(x[tokens], w13[expert]))
        result = F.linear(hidden, w2[expert]).float() * weights[tokens, rank, None]
        results[tokens, rank] = result.to(x.dtype)
    return results.float().sum(1).to(x.dtype)
