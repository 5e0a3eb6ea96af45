"""Paged attention on the CPU, in few torch operations.

What is the same for all layers of a step (which pages to gather, which keys to mask) is worked out
once, in `plan_attention`. Prefill segments go one by one, with their keys gathered once and their
queries in parts. Decode sequences of like length share one gather and one attention call: an
operation costs about 8 µs before it computes anything. Pages that happen to lie one after another
are read in place.
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
# Values gathered for one call, keys or values alone. 8 MiB of float32: what was gathered is still
# in the cache when it is read, and the allocator hands the same memory out again.
_GATHERED_VALUES: Final = 2 << 20
# Queries of a prefill segment in one call: fewer read the keys too often, more compute what the
# mask drops. Measured on SmolLM2-135M's heads, parts of 256 against all of 512 to 2,048 queries,
# after one to seven times as many cached tokens: 0.8 to 1.05 of the time; with a window, 0.1.
_PART_QUERIES: Final = 256
# Values of a mask: 64 MiB of float32, and fewer queries in a part where that is what it takes.
_MASK_VALUES: Final = 16 << 20


@dataclass(frozen=True, slots=True)
class _Call:
    """One attention call: a prefill segment, or decode sequences of like length.

    queries  which of the step's tokens: a slice, or int64 indices where they are not consecutive
    pages    of each sequence as many as the longest has, as a slice or int64 indices likewise
    keys     of the longest sequence
    masks    by window: added to the scores; None where all keys are seen (decode) or the plain
             causal triangle is (prefill). Decode: broadcasts to [sequences, heads, queries, keys].
             Prefill: [queries of a part, keys], of the last part; it fits the others as well, since
             what a query sees depends on its distance from a key alone
    """

    queries: slice | Tensor
    pages: slice | Tensor
    keys: int
    is_decode: bool
    masks: dict[int | None, Tensor | None]


@dataclass(frozen=True, slots=True)
class CpuPlan:
    """The calls of one step, the same for every layer."""

    calls: tuple[_Call, ...]

    def attend(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """As `ops.paged_attention`."""
        if len(self.calls) == 1:
            return _attend(self.calls[0], q, k_cache, v_cache, scale, window)
        out = q.new_empty(q.shape)
        for call in self.calls:
            out[call.queries] = _attend(call, q, k_cache, v_cache, scale, window)
        return out


def plan_attention(
    batch: AttentionBatch, k_cache: Tensor, windows: Iterable[int | None]
) -> AttentionBatch:
    """`batch`, whose tensors are on the CPU, with a plan for all layers with these windows.

    k_cache  any layer's, for its shape and dtype
    """
    windows = frozenset(windows)
    calls = (*_prefill_calls(batch, k_cache, windows), *_decode_calls(batch, k_cache, windows))
    return replace(batch, plan=CpuPlan(calls))


def _prefill_calls(
    batch: AttentionBatch, k_cache: Tensor, windows: Iterable[int | None]
) -> Iterator[_Call]:
    bounds, kv_lens = batch.q_indptr.tolist(), batch.kv_lens.tolist()
    table = batch.page_table.numpy()
    for i in range(batch.prefills):
        start, end, keys = bounds[i], bounds[i + 1], kv_lens[i]
        is_whole = end - start == keys
        masks = {
            window: None
            if is_whole and (window is None or window >= keys)
            else _part_mask(end - start, keys, window, k_cache.dtype)
            for window in windows
        }
        pages = _run_or_indices(table[i, : -(-keys // k_cache.shape[1])])
        yield _Call(slice(start, end), pages, keys, False, masks)


def _decode_calls(
    batch: AttentionBatch, k_cache: Tensor, windows: Iterable[int | None]
) -> Iterator[_Call]:
    first = int(batch.q_indptr[batch.prefills])
    kv_lens = batch.kv_lens.numpy()[batch.prefills :]
    table = batch.page_table.numpy()[batch.prefills :]
    _, page_size, kv_heads, head_dim = k_cache.shape
    for sequences in _alike(kv_lens, _GATHERED_VALUES // (kv_heads * head_dim)):
        lengths = kv_lens[sequences]
        keys = int(lengths.max())
        query = (lengths - 1)[:, None, None, None]
        are_equal = int(lengths.min()) == keys
        masks = {
            window: None
            if are_equal and (window is None or window >= keys)
            else _mask(query, keys, window, k_cache.dtype)
            for window in windows
        }
        pages = _run_or_indices(table[sequences, : -(-keys // page_size)].reshape(-1))
        yield _Call(_run_or_indices(sequences + first), pages, keys, True, masks)


def _alike(kv_lens: Ints, most_keys: int) -> list[NDArray[np.int64]]:
    """Sequence indices in groups that waste little on padding and gather at most `most_keys` keys.

    In the batch's order where no two differ much, else the longest first.
    """
    if kv_lens.size == 0:
        return []
    in_order = kv_lens.max() - kv_lens.min() <= _PADDING_KEYS
    order = range(kv_lens.size) if in_order else np.argsort(-kv_lens, kind="stable").tolist()
    lengths = kv_lens.tolist()
    groups: list[list[int]] = []
    longest = 0
    for sequence in order:
        length = lengths[sequence]
        joint = max(longest, length)
        if (
            not groups
            or joint - length > _PADDING_KEYS
            or (len(groups[-1]) + 1) * joint > most_keys
        ):
            groups.append([])
            joint = length
        groups[-1].append(sequence)
        longest = joint
    return [np.array(group, np.int64) for group in groups]


def _part_mask(queries: int, keys: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """The mask of the last of the parts that a prefill segment's queries are cut into."""
    part = min(queries, _PART_QUERIES, max(1, _MASK_VALUES // keys))
    if window is not None:
        keys = min(keys, part + window - 1)
    return _mask(np.arange(keys - part, keys)[:, None], keys, window, dtype)


def _mask(query: Ints, keys: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """0 where the query at this position sees the key, else -inf; `query` broadcasts to keys."""
    key = np.arange(keys)
    seen = key <= query
    if window is not None:
        seen &= key > query - window
    zero = torch.zeros((), dtype=dtype)
    return torch.where(torch.from_numpy(seen), zero, float("-inf"))


def _run_or_indices(numbers: Ints) -> slice | Tensor:
    """A slice where they are consecutive, else int64 indices."""
    first = int(numbers[0])
    if np.array_equal(numbers, np.arange(first, first + numbers.size)):
        return slice(first, first + numbers.size)
    return torch.from_numpy(numbers.astype(np.int64))


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: AttentionBatch,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """As `ops.paged_attention`; plans for this call alone where the batch carries no plan."""
    plan = batch.plan or plan_attention(batch, k_cache, (window,)).plan
    assert plan is not None
    return plan.attend(q, k_cache, v_cache, scale, window)


def _attend(
    call: _Call, q: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float, window: int | None
) -> Tensor:
    """[queries of the call, hq, d]."""
    kv_heads, head_dim = k_cache.shape[-2:]
    q = q[call.queries]
    sequences = len(q) if call.is_decode else 1
    k, v = (
        (cache[call.pages] if isinstance(call.pages, slice) else cache.index_select(0, call.pages))
        .view(sequences, -1, kv_heads, head_dim)[:, : call.keys]
        .transpose(1, 2)
        for cache in (k_cache, v_cache)
    )
    mask = call.masks[window]
    if call.is_decode:
        # The query heads that share a key head stand in for queries: no key is read twice.
        grouped = q.view(sequences, kv_heads, -1, head_dim)
        out = F.scaled_dot_product_attention(grouped, k, v, mask, scale=scale)
        return out.reshape(q.shape)
    if mask is None:
        return _attend_part(q, k, v, None, scale)
    out = q.new_empty(q.shape)
    for start in range(0, len(q), len(mask)):
        part = q[start : start + len(mask)]
        last = call.keys - len(q) + start + len(part)  # key that the part sees, exclusive
        seen = slice(max(0, last - mask.shape[1]), last)
        own_mask = mask[-len(part) :, seen.start - seen.stop :]
        out[start : start + len(part)] = _attend_part(
            part, k[:, :, seen], v[:, :, seen], own_mask, scale
        )
    return out


def _attend_part(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """[queries, hq, d], of keys and values [1, hkv, keys, d]; causal where there is no mask."""
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k, v, mask, is_causal=mask is None, scale=scale, enable_gqa=True
    )
    return out[0].transpose(0, 1)
