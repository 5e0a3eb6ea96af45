"""The operations of a forward pass: one signature for every device.

Each picks its implementation by the device of its first tensor: CUDA kernels, or torch on the CPU.
Knows no model.

n = tokens of the step, hq / hkv = query / key-value heads, d = head_dim, v = vocabulary. Unless a
line says otherwise, tensors have the model's dtype and are contiguous, arithmetic is float32 and a
result is rounded once. The CUDA ones launch on the current stream, do not synchronise and may be
captured in a graph.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.nn.functional as F

from gpu_ops import cpu_attention, cpu_linear, reference, sampling
from gpu_ops.batch import AttentionBatch
from gpu_ops.unnormed import Unnormed

Tensor = torch.Tensor


# Where a CUDA implementation is, if not in cuda_ops.
_CUDA_MODULES: Final = {
    "sample": "gpu_ops.cuda_sampling",
    "moe": "gpu_ops.cuda_moe",
    "prepare": "gpu_ops.cuda_moe",
    "takes": "gpu_ops.cuda_linear",
    "takes_many": "gpu_ops.cuda_linear",
    "many_linear": "gpu_ops.cuda_linear",
    "many_linear_silu_mul": "gpu_ops.cuda_linear",
    "many_linear_add_": "gpu_ops.cuda_linear",
    "norm_linear": "gpu_ops.cuda_linear",
    "norm_linear_silu_mul": "gpu_ops.cuda_linear",
    "linear_add_": "gpu_ops.cuda_linear",
    "linear_add_rms_norm_": "gpu_ops.cuda_split_linear",
}


@functools.cache
def _cuda(name: str) -> Callable[..., Tensor]:
    """A CUDA implementation; its module is loaded on first use: a CPU needs none of it."""
    module = importlib.import_module(_CUDA_MODULES.get(name, "gpu_ops.cuda_ops"))
    implementation: Callable[..., Tensor] = getattr(module, name)
    return implementation


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x weightᵀ + bias, [n, out].

    x       [n, in]
    weight  [out, in], or on the CPU one that `cpu_linear.pack` made
    """
    if weight.is_mkldnn:
        return cpu_linear.packed_linear(x, weight, bias)
    return F.linear(x, weight, bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) * weight over the last dimension; a new tensor.

    x       [..., size]
    weight  [size]
    """
    if x.is_cuda:
        return _cuda("rms_norm")(x, weight, eps)
    return reference.rms_norm(x, weight, eps)


def embed_rms_norm(ids: Tensor, table: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(table[ids], its rms_norm), both new and [n, size].

    ids     [n] int32, each below vocabulary
    table   [vocabulary, size]
    weight  [size]
    """
    if ids.is_cuda:
        residual, normed = _cuda("embed_rms_norm")(ids, table, weight, eps)
        return residual, normed
    rows = F.embedding(ids, table)
    return rows, reference.rms_norm(rows, weight, eps)


def embed_part(ids: Tensor, table: Tensor, first: int) -> Tensor:
    """[n, size], new: the rows of ids that `table` has, and zeros for all others.

    ids    [n] int32
    table  [m, size]: the rows of the ids first to first + m - 1
    """
    at = ids - first
    missing = (at < 0) | (at >= len(table))
    return F.embedding(at.masked_fill(missing, 0), table).masked_fill_(missing[:, None], 0.0)


def add_rms_norm_(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """residual += x in place; returns rms_norm(residual, weight, eps), a new tensor.

    x, residual  [n, size]; the sum is rounded to their dtype before it is normed
    weight       [size]
    """
    if x.is_cuda:
        return _cuda("add_rms_norm_")(x, residual, weight, eps)
    return reference.add_rms_norm_(x, residual, weight, eps)


def linear_add_rms_norm_(
    x: Tensor, weight: Tensor, residual: Tensor, norm: Tensor, eps: float
) -> Tensor:
    """residual += x weightᵀ in place; returns rms_norm(residual, norm, eps), a new tensor.

    x         [n, in]
    weight    [out, in], as `linear` takes it
    residual  [n, out]; the product is rounded before it is added, and their sum before it is normed
    norm      [out]
    """
    if x.is_cuda:
        return _cuda("linear_add_rms_norm_")(x, weight, residual, norm, eps)
    return reference.add_rms_norm_(linear(x, weight), residual, norm, eps)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, [n, f].

    gate_up  [n, 2 f]: gate, then up
    """
    if gate_up.is_cuda:
        return _cuda("silu_mul")(gate_up)
    return reference.silu_mul(gate_up)


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
    """q, normed if there are weights, then rotated: [n, hq, d]; k, done likewise, and v are stored.

    qkv                 [n, (hq + 2 hkv) * d]: query heads, key heads, value heads
    q_weight, k_weight  [d]: RMS norm of each head before it is rotated; both or neither
    cos_sin             [max_positions, d] float32: d / 2 cosines, then d / 2 sines
    positions           [n] int32, rows of cos_sin
    slots               [n] int32: page * page_size + offset; distinct, but for those of page 0
    k_cache, v_cache    [pages, page_size, hkv, d], written in place

    Rotation pairs dimension i with i + d / 2. The result need not be contiguous in n.
    """
    arguments = (qkv, q_weight, k_weight, eps, cos_sin, positions, slots, k_cache, v_cache)
    if qkv.is_cuda:
        return _cuda("qk_norm_rope_store")(*arguments)
    return reference.qk_norm_rope_store(*arguments)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: AttentionBatch,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Causal attention of each sequence's queries over its paged keys and values, [n, hq, d].

    q                 [n, hq, d], heads contiguous
    k_cache, v_cache  [pages, page_size, hkv, d]; query head h reads key head h // (hq / hkv)
    scale             of the scores, 1 / sqrt(d) for most models
    window            keys a query sees, itself included; None: all up to itself

    A batch without a plan is planned for this call alone; on CUDA that synchronises.
    """
    if batch.plan is not None:
        return batch.plan.attend(q, k_cache, v_cache, scale, window)
    if q.is_cuda:
        return reference.paged_attention(q, k_cache, v_cache, batch, scale, window)
    return cpu_attention.paged_attention(q, k_cache, v_cache, batch, scale, window)


def rope_attention(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: AttentionBatch,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """`qk_norm_rope_store`, then `paged_attention`, [n, hq, d]; one kernel where a batch has it."""
    if batch.fused is not None:
        return batch.fused.attend_qkv(
            qkv, q_weight, k_weight, eps, cos_sin, k_cache, v_cache, scale, window
        )
    q = qk_norm_rope_store(
        qkv, q_weight, k_weight, eps, cos_sin, positions, slots, k_cache, v_cache
    )
    return paged_attention(q, k_cache, v_cache, batch, scale, window)


def takes_few_rows(rows: int, *weights: Tensor) -> bool:
    """Whether `rows` rows times each of these weights can run fused with what is around it."""
    if not weights or not weights[0].is_cuda:
        return False
    return all(_cuda("takes")(rows, weight) for weight in weights)


def norm_linear(x: Tensor, norm: Tensor, eps: float, weight: Tensor) -> Tensor:
    """rms_norm(x, norm, eps) weightᵀ, [n, out], for what `takes_few_rows`."""
    return _cuda("norm_linear")(x, norm, eps, weight)


def norm_linear_silu_mul(x: Tensor, norm: Tensor, eps: float, weight: Tensor) -> Tensor:
    """silu_mul(rms_norm(x, norm, eps) weightᵀ), [n, out / 2], for what `takes_few_rows`."""
    return _cuda("norm_linear_silu_mul")(x, norm, eps, weight)


def linear_add_(x: Tensor, weight: Tensor, residual: Tensor) -> None:
    """residual [n, out] += x weightᵀ, for what `takes_few_rows`."""
    _cuda("linear_add_")(x, weight, residual)


def takes_many_rows(rows: int, *weights: Tensor) -> bool:
    """Whether so many rows times each of these can run with the norms between them shared out."""
    if not weights or not weights[0].is_cuda:
        return False
    return all(_cuda("takes_many")(rows, weight) for weight in weights)


def many_linear(x: Tensor | Unnormed, weight: Tensor) -> Tensor:
    """x weightᵀ, [n, out], of x as it is once normed, for what `takes_many_rows`."""
    return _cuda("many_linear")(x, weight)


def many_linear_silu_mul(x: Tensor | Unnormed, weight: Tensor) -> Tensor:
    """silu_mul(x weightᵀ), [n, out / 2], of x once normed, for what `takes_many_rows`."""
    return _cuda("many_linear_silu_mul")(x, weight)


def many_linear_add_(
    x: Tensor, weight: Tensor, residual: Tensor, norm: Tensor, eps: float
) -> Unnormed:
    """residual [n, out] += x weightᵀ; its rms_norm, half done; for what `takes_many_rows`."""
    implementation: Callable[..., Any] = _cuda("many_linear_add_")
    half_done: Unnormed = implementation(x, weight, residual, norm, eps)
    return half_done


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed_lo: Tensor,
    seed_hi: Tensor,
    position: Tensor,
) -> Tensor:
    """One token id per row, [n] int32. A row's id does not depend on the other rows.

    logits            [n, v] model's dtype or float32
    temperature       [n] float32; 0 is greedy: the largest logit, the lowest id among equals
    top_k             [n] int32, 0 is off
    top_p, min_p      [n] float32, 1 and 0 are off
    seed_lo, seed_hi  [n] int32, the words of the seed
    position          [n] int32, the sampled token's index in its sequence

    p = softmax(logits / temperature). In transformers' order: an id stays if its logit is at least
    the top_k-th largest; and, of what that leaves, its p at least the smallest p in the smallest
    set (largest p first) that holds top_p of the mass left; and its p at least min_p times the
    largest.
    Equals stay together.
    u = word 0 of Philox4x32-10 over 2³², with key (seed_lo, seed_hi), counter (position, 0, 0, 0).
    The id is the first, in order of ids, at which the mass that stays exceeds u times its total.
    """
    arguments = (logits, temperature, top_k, top_p, min_p, seed_lo, seed_hi, position)
    if logits.is_cuda:
        return _cuda("sample")(*arguments)
    return sampling.sample(*arguments)


def moe(
    x: Tensor, router_logits: Tensor, w13: Tensor, w2: Tensor, top_k: int, renormalise: bool
) -> Tensor:
    """Each token's top_k experts' outputs, weighted by the router's softmax, [n, size].

    x              [n, size]
    router_logits  [n, experts]; the softmax runs over all experts, then `renormalise` scales the
                   chosen ones to sum to 1; of equal logits the lowest expert is chosen
    w13            [experts, 2 f, size]: gate, then up
    w2             [experts, size, f]

    Rounded to the model's dtype: silu(gate) * up, each expert's weighted output, and their sum.
    On CUDA it synchronises, and cannot be captured, where `prepare_moe` said no.
    """
    if x.is_cuda:
        return _cuda("moe")(x, router_logits, w13, w2, top_k, renormalise)
    return reference.moe(x, router_logits, w13, w2, top_k, renormalise)


def prepare_moe(w13: Tensor, top_k: int, renormalise: bool) -> bool:
    """Whether `moe` with these weights may be captured. Compiles its kernels first; blocks."""
    return w13.is_cuda and bool(_cuda("prepare")(w13, top_k, renormalise))
