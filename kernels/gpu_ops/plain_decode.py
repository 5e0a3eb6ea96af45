"""Decode steps in plain torch, for what the CUDA kernels do not take; and what tests run on a CPU.

Same interface as `cuda_decode.DecodeAttention` and `cuda_sampling.Sampler`. Attention gathers every
page a row could have: slow for long contexts, but of fixed shape, so it can be captured in a graph.
"""

import torch
import torch.nn.functional as F

from gpu_ops import ops
from gpu_ops.cuda_decode import DecodeInputs, StepState
from gpu_ops.cuda_sampling import SamplingState
from gpu_ops.host_ring import COUNT_MASK, PLACES, HostRing

Tensor = torch.Tensor


class PlainDecodeAttention:
    """Attention of one query per sequence, any dtype and head_dim. Owned by the engine thread."""

    def __init__(self, page_size: int, window: int | None) -> None:
        self._page_size, self._window = page_size, window

    def plan(self, kv_lens: Tensor) -> None:
        """Nothing is planned."""

    def prepare(self, rows: Tensor, state: StepState, inputs: DecodeInputs) -> None:
        """As `DecodeAttention.prepare`."""
        row = rows.long()
        padding = rows == len(state.lengths) - 1
        positions = torch.where(padding, 0, state.lengths[row])
        index = (positions // self._page_size).long()
        pages = torch.where(padding, 0, state.page_table[row, index])
        inputs.ids.copy_(torch.where(padding, 0, state.last_token[row]))
        inputs.positions.copy_(positions)
        inputs.slots.copy_(pages * self._page_size + positions % self._page_size)
        inputs.kv_lens.copy_(positions + 1)
        state.lengths[row] = torch.where(padding, 0, positions + 1)

    def attend(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        kv_lens: Tensor,
        page_table: Tensor,
        scale: float,
        rows: Tensor | None = None,
        out: Tensor | None = None,
        keys_are_new: bool = False,
    ) -> Tensor:
        """As `DecodeAttention.attend`."""
        table = (page_table if rows is None else page_table[rows.long()]).long()
        n, (kv_heads, head_dim) = len(q), k_cache.shape[-2:]
        keys, values = (
            cache[table].view(n, -1, kv_heads, head_dim).transpose(1, 2)
            for cache in (k_cache, v_cache)
        )
        at = torch.arange(keys.shape[2], device=q.device)
        seen = at < kv_lens[:, None]
        if self._window is not None:
            seen &= at >= kv_lens[:, None] - self._window
        grouped = q.reshape(n, kv_heads, -1, head_dim)
        result = F.scaled_dot_product_attention(
            grouped, keys, values, seen[:, None, None], scale=scale
        ).reshape(q.shape)
        return result if out is None else out.copy_(result)


class PlainSampler:
    """Samples by `ops.sample`, which synchronises on a CPU only. Owned by the engine thread."""

    def sample_into(
        self,
        ids: Tensor,
        logits: Tensor,
        state: SamplingState,
        position: Tensor,
        rows: Tensor,
        last_token: Tensor,
        ring: HostRing | None = None,
    ) -> None:
        """As `Sampler.sample_into`."""
        row = rows.long()
        drawn = ops.sample(
            logits, state.temperature[row], state.top_k[row], state.top_p[row], state.min_p[row],
            state.seed_lo[row], state.seed_hi[row], position,
        )  # fmt: skip
        ids.copy_(drawn)
        last_token[row] = ids
        if ring is not None:
            launch = int(ring.launches[0]) - 1 & COUNT_MASK
            place = ring.ids[launch % PLACES, : len(ids)]
            place[:, 0], place[:, 1] = ids, launch
