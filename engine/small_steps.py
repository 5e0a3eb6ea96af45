"""Steps of few tokens that have prompts among them, each as one CUDA graph.

A short prompt launched kernel by kernel costs more on the host than on the device. In a small step
every token, a prompt's or a decode row's, is a sequence of one query: shapes depend on nothing but
the number of tokens, and weights are read once for prompts and decode rows together. Keys are read
by each token for itself, so prompts behind a long context are left to `PrefillRunner`.
"""

from typing import Any, Final

import torch

from engine.attention import DecodeAttentions
from engine.descriptor import StepDescriptor
from engine.forward import Parts
from engine.graph_sizes import token_buckets_up_to
from engine.graphs import ForwardGraphs
from gpu_ops.batch import AttentionBatch
from gpu_ops.device_rows import prepare_tokens
from gpu_ops.token_inputs import TokenInputs

Tensor = torch.Tensor

MOST_KEYS_READ: Final = 65_536  # by a step's prompt tokens: as much as a full decode step reads


class SmallStepRunner:
    """Runs small steps, replaying a graph where there is one. Owned by the engine thread.

    hidden  [at least its tokens, hidden], of the last step
    ids     [most tokens] int32, what was drawn for each token; of use where one was wanted
    """

    def __init__(self, parts: Parts, attentions: DecodeAttentions, most_tokens: int) -> None:
        device = parts.model.device
        self.ids = torch.zeros(most_tokens, dtype=torch.int32, device=device)
        self.hidden = torch.empty((0, 0), device=device)
        self._parts, self._attentions = parts, attentions
        self._tokens = TokenInputs.allocate(most_tokens, device)
        self._q_indptr = torch.arange(most_tokens + 1, dtype=torch.int32, device=device)
        self._graphs = ForwardGraphs()

    @property
    def buckets(self) -> tuple[int, ...]:
        """Numbers of tokens that get a graph."""
        return token_buckets_up_to(len(self.ids))

    def takes(self, step: StepDescriptor) -> bool:
        """Whether a step with prefill segments is a small one."""
        tokens = len(step.prefill_tokens) + len(step.decode_rows)
        if tokens > len(self.ids):
            return False
        _, start, count, _ = step.segments.T
        return int((count * start + count * (count + 1) // 2).sum()) <= MOST_KEYS_READ

    def capture(self, stream: Any, pool: Any) -> None:
        """A graph for each bucket, with memory of `pool`; as `ForwardGraphs.capture`."""
        if not self.buckets:
            return
        self._prepare_padding()
        self._graphs.pool = pool
        self._graphs.capture(self.buckets, self._forward, stream)

    def run(self, segments: Tensor, tokens: Tensor, decode_rows: Tensor) -> None:
        """Leaves `ids` and `hidden`: of the segments' tokens, then of the decode rows.

        segments [n, 4], tokens [m], decode_rows [d]  int32 on the device
        """
        parts, padded = self._parts, self._graphs.padded(len(tokens) + len(decode_rows))
        state, prepared = parts.rows.step, self._tokens.first(padded)
        prepare_tokens(segments, tokens, decode_rows, state, parts.page_size, prepared)
        self.hidden = self._graphs.run(padded, self._forward)

    def positions(self, first: int, end: int) -> Tensor:
        """[end - first] int32, of what was drawn for those tokens."""
        return self._tokens.inputs.kv_lens[first:end]

    def _prepare_padding(self) -> None:
        """Tokens of the dummy row alone: what graphs of any size are captured with."""
        device = self.ids.device
        segments = torch.empty((0, 4), dtype=torch.int32, device=device)
        none, state = segments.view(-1), self._parts.rows.step
        prepare_tokens(segments, none, none, state, self._parts.page_size, self._tokens)

    def _forward(self, n: int) -> Tensor:
        parts, tokens = self._parts, self._tokens.first(n)
        inputs = tokens.inputs
        batch = AttentionBatch(
            q_indptr=self._q_indptr[: n + 1],
            kv_lens=inputs.kv_lens,
            page_table=parts.rows.step.page_table,
            prefills=0,
            decodes=n,
            plan=self._attentions.plan(tokens, parts.rows.step),
        )
        hidden = parts.model.hidden_states(
            inputs.ids, inputs.positions, inputs.slots, parts.cache, batch
        )
        parts.sample(self.ids[:n], hidden, inputs.kv_lens, tokens.sampled_rows)
        return hidden
