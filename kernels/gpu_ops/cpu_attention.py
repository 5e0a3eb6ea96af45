"""Paged attention on the CPU, in few torch operations.

What is the same for all layers of a step (which pages to gather, which keys to mask) is worked out
once, in `plan_attention`. Prefill segments go one by one. Decode sequences of like length share
one gather and one attention call: an operation costs about 8 µs before it computes anything.
Pages that happen to lie one after another are read in place.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from gpu_ops.batch import AttentionBatch

Tensor = torch.Tensor
Ints = NDArray[np.signedinteger]

# Keys of padding a sequence may cost before it gets a call of its own: gathering so many takes
# about as long as one more call.
_PADDING_KEYS: Final = 128


@dataclass(frozen=True, slots=True)
class _Call:
    """One attention call: a prefill segment, or decode sequences of like length.

    queries  which of the step's tokens: a slice, or int64 indices (decode: one per sequence)
    pages    int64 [sequences * pages of the longest], or a slice where they are consecutive
    keys     of the longest sequence
    masks    by window: added to the scores, broadcasts to [sequences, heads, queries, keys]; None
             where all keys are seen (decode) or the plain causal triangle is (prefill)
    """

    queries: slice | Tensor
    pages: slice | Tensor
    keys: int
    decode: bool
    masks: dict[int | None, Tensor | None]


def plan_attention(
    batch: AttentionBatch, page_size: int, windows: Iterable[int | None], dtype: torch.dtype
) -> AttentionBatch:
    """`batch`, whose tensors are on the CPU, with a plan for all layers with these windows."""
    calls = [*_prefill_calls(batch, page_size, windows, dtype)]
    calls += _decode_calls(batch, page_size, windows, dtype)
    return replace(batch, plan=tuple(calls))


def _prefill_calls(
    batch: AttentionBatch, page_size: int, windows: Iterable[int | None], dtype: torch.dtype
) -> Iterator[_Call]:
    bounds, kv_lens = batch.q_indptr.tolist(), batch.kv_lens.tolist()
    table = batch.page_table.numpy()
    for i in range(batch.prefills):
        start, end, keys = bounds[i], bounds[i + 1], kv_lens[i]
        query = np.arange(keys - (end - start), keys)[:, None]
        whole = end - start == keys
        masks = {
            window: None
            if whole and (window is None or window >= keys)
            else _mask(query, keys, window, dtype)
            for window in windows
        }
        pages = _runs(table[i, : -(-keys // page_size)])
        yield _Call(slice(start, end), pages, keys, False, masks)


def _decode_calls(
    batch: AttentionBatch, page_size: int, windows: Iterable[int | None], dtype: torch.dtype
) -> Iterator[_Call]:
    first = int(batch.q_indptr[batch.prefills])
    kv_lens = batch.kv_lens.numpy()[batch.prefills :]
    table = batch.page_table.numpy()[batch.prefills :]
    for sequences in _alike(kv_lens):
        lengths = kv_lens[sequences]
        keys = int(lengths.max())
        pages = _runs(table[sequences, : -(-keys // page_size)].reshape(-1))
        queries: slice | Tensor = slice(first, first + len(kv_lens))
        if len(sequences) < len(kv_lens):
            queries = torch.from_numpy(sequences + first)
        query = (lengths - 1)[:, None, None, None]
        masks = {
            window: None
            if lengths.min() == keys and (window is None or window >= keys)
            else _mask(query, keys, window, dtype)
            for window in windows
        }
        yield _Call(queries, pages, keys, True, masks)


def _alike(kv_lens: Ints) -> list[NDArray[np.int64]]:
    """Sequence indices in groups that waste little on padding; one group in order if that does."""
    if kv_lens.size == 0:
        return []
    if kv_lens.max() - kv_lens.min() <= _PADDING_KEYS:
        return [np.arange(kv_lens.size)]
    order = np.argsort(-kv_lens, kind="stable")
    groups: list[list[int]] = []
    for sequence in order.tolist():
        if not groups or kv_lens[groups[-1][0]] - kv_lens[sequence] > _PADDING_KEYS:
            groups.append([])
        groups[-1].append(sequence)
    return [np.array(group, np.int64) for group in groups]


def _mask(query: Ints, keys: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """0 where the query at this position sees the key, else -inf; `query` broadcasts to keys."""
    key = np.arange(keys)
    seen = key <= query
    if window is not None:
        seen &= key > query - window
    zero = torch.zeros((), dtype=dtype)
    return torch.where(torch.from_numpy(seen), zero, float("-inf"))


def _runs(pages: Ints) -> slice | Tensor:
    """The pages as a slice where they are consecutive, else as indices."""
    first = int(pages[0])
    if np.array_equal(pages, np.arange(first, first + pages.size)):
        return slice(first, first + pages.size)
    return torch.from_numpy(pages.astype(np.int64))


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: AttentionBatch,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """As `ops.paged_attention`; plans for this call alone where the batch carries no plan."""
    if batch.plan is None:
        batch = plan_attention(batch, k_cache.shape[1], (window,), q.dtype)
    calls: tuple[_Call, ...] = batch.plan
    if len(calls) == 1:
        return _attend(calls[0], q, k_cache, v_cache, scale, window)
    out = q.new_empty(q.shape)
    for call in calls:
        out[call.queries] = _attend(call, q, k_cache, v_cache, scale, window)
    return out


def _attend(
    call: _Call, q: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float, window: int | None
) -> Tensor:
    """[queries of the call, hq, d]."""
    kv_heads, head_dim = k_cache.shape[-2:]
    q = q[call.queries]
    sequences = len(q) if call.decode else 1
    k, v = (
        (cache[call.pages] if isinstance(call.pages, slice) else cache.index_select(0, call.pages))
        .view(sequences, -1, kv_heads, head_dim)[:, : call.keys]
        .transpose(1, 2)
        for cache in (k_cache, v_cache)
    )
    mask = call.masks[window]
    if call.decode:
        # The query heads that share a key head stand in for queries: no key is read twice.
        grouped = q.view(sequences, kv_heads, -1, head_dim)
        out = F.scaled_dot_product_attention(grouped, k, v, mask, scale=scale)
        return out.reshape(q.shape)
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k, v, mask, is_causal=mask is None, scale=scale, enable_gqa=True
    )
    return out[0].transpose(0, 1)
