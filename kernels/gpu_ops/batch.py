"""What attention must know of a step: which queries belong together, and where their pages are.

Knows nothing of requests or rows: a sequence is a run of queries and a list of pages.
"""

from dataclasses import dataclass, field
from typing import Protocol

import torch


class AttentionPlan(Protocol):
    """What a backend derived from a batch, once for all layers. Owned by whoever runs the step."""

    def attend(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """`ops.paged_attention` of the batch that was planned."""
        ...


class FusedAttentionPlan(Protocol):
    """A plan whose backend also norms, rotates and stores. Owned by whoever runs the step."""

    def attend_qkv(
        self,
        qkv: torch.Tensor,
        q_weight: torch.Tensor | None,
        k_weight: torch.Tensor | None,
        eps: float,
        cos_sin: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """`ops.rope_attention` of the batch that was planned."""
        ...


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """The sequences of one step: first the prefill segments, then the decode rows, one query each.

    q_indptr    [sequences + 1]            int32: sequence i owns queries [indptr[i], indptr[i+1])
    kv_lens     [sequences]                int32: keys it attends to, its own new ones included
    page_table  [sequences, max_pages]     int32: its pages in order; past its end anything valid

    The last query of a sequence is its key kv_lens - 1, and a query sees no later key. A padding
    sequence (CUDA graphs by bucket) has one query, kv_lens 1 and the dummy page 0.

    Compatible with graph capture: the tensors may be static buffers that a replay refills. Then
    both counts are those of the capture.
    """

    q_indptr: torch.Tensor
    kv_lens: torch.Tensor
    page_table: torch.Tensor
    prefills: int
    decodes: int
    plan: AttentionPlan | None = field(default=None, compare=False)
    fused: FusedAttentionPlan | None = field(default=None, compare=False)
