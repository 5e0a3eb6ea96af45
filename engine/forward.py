"""A step's two parts on the device: prefill segments, eagerly, and decode rows, as CUDA graphs.

Both launch on the current stream and do not synchronise. What their kernels read of rows is the
rows' state on the device; neither knows what was decided or why.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import torch

from engine.attention import DecodeAttentions, PrefillPlan
from engine.descriptor import StepDescriptor
from engine.flashinfer_prefill import FlashInferPrefill
from engine.graphs import ForwardGraphs
from engine.kv_cache import KvCache
from engine.models.decoder import Decoder
from engine.request import Int32Array
from gpu_ops.batch import AttentionBatch
from gpu_ops.cuda_decode import decode_inputs
from gpu_ops.cuda_sampling import SamplingState
from gpu_ops.device_rows import DeviceRows, apply_left, position_slots
from gpu_ops.host_ring import HostRing

Tensor = torch.Tensor

# Tokens times weights of a layer, up to where launching takes longer than computing: there
# FlashInfer loses, whose host time is more. 1 x 1,024 tokens of 0.6B took 13.3 ms, 9.7 with torch;
# but 4 x 4,096 tokens 45.8 and 56.0 ms, and 1 x 1,024 tokens of 14B 46.9 and 47.4.
_MOST_LAUNCH_BOUND: Final = 90_000_000_000


class AnySampler(Protocol):
    """`cuda_sampling.Sampler`, or its plain version."""

    def sample_into(
        self,
        ids: Tensor,
        logits: Tensor,
        state: SamplingState,
        position: Tensor,
        rows: Tensor,
        last_token: Tensor,
        ring: HostRing | None = None,
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class Parts:
    """What every step runs with."""

    model: Decoder
    cache: KvCache
    page_size: int
    rows: DeviceRows
    sampler: AnySampler

    def sample(
        self,
        ids: Tensor,
        hidden: Tensor,
        position: Tensor,
        rows: Tensor,
        ring: HostRing | None = None,
    ) -> None:
        """ids[i] = last_token[rows[i]] = a token for hidden[i]; position is its index."""
        logits, state = self.model.logits(hidden), self.rows
        self.sampler.sample_into(
            ids, logits, state.sampling, position, rows, state.step.last_token, ring
        )


class DecodeRunner:
    """Runs decode steps, replaying a graph where there is one. Owned by the engine thread.

    ids     [most rows] int32, the last step's sampled ids, in order of its rows
    hidden  [at least its rows, hidden], what its logits came from
    ring    from where each step takes changes, and where its ids go for the host
    """

    def __init__(self, parts: Parts, attentions: DecodeAttentions, ring: HostRing) -> None:
        most, device = len(parts.rows.decode_rows), parts.model.device
        self.ids = torch.zeros(most, dtype=torch.int32, device=device)
        self._parts, self._attentions = parts, attentions
        self._inputs = decode_inputs(most, device)
        self._q_indptr = torch.arange(most + 1, dtype=torch.int32, device=device)
        self.hidden = torch.empty((0, 0), device=device)
        self.graphs = ForwardGraphs()
        self.ring = ring

    def capture(self, buckets: Sequence[int], stream: Any) -> None:
        """Graphs for these numbers of rows; as `ForwardGraphs.capture`. Synchronises."""
        self.graphs.capture(buckets, self._forward, stream)
        self.ring.count_on()

    def run(self, rows: int, changes: Int32Array | None = None) -> int:
        """One token for each of the first `rows` decode rows; returns the launch's number.

        changes  made before: the beginning of a descriptor without prompts, for the ring
        """
        launch = self.ring.leave(changes)
        self.hidden = self.graphs.run(self.graphs.padded(rows), self._forward)
        return launch

    def positions(self, rows: int) -> Tensor:
        """[rows] int32, of the ids that `run` sampled."""
        return self._inputs.kv_lens[:rows]

    def _forward(self, n: int) -> Tensor:
        parts = self._parts
        inputs = self._inputs.first(n)
        rows, state = parts.rows.decode_rows[:n], parts.rows.step
        apply_left(self.ring, parts.rows)
        plan = self._attentions.prepare(rows, state, inputs)
        batch = AttentionBatch(
            q_indptr=self._q_indptr[: n + 1],
            kv_lens=inputs.kv_lens,
            page_table=state.page_table,
            prefills=0,
            decodes=n,
            plan=plan,
            fused=plan.fused,
        )
        hidden = parts.model.hidden_states(
            inputs.ids, inputs.positions, inputs.slots, parts.cache, batch
        )
        parts.sample(self.ids[:n], hidden, inputs.kv_lens, rows, self.ring)
        return hidden


@dataclass(frozen=True, slots=True)
class SegmentIndex:
    """What is worked out on the host for a step's prefill segments, int32 arrays all.

    q_starts, kv_starts  [segments + 1] where each one's queries and keys begin
    sampled              [n] the queries that are sampled from
    rows, positions      [n] their rows, and the sampled tokens' indices in their sequences
    """

    q_starts: Int32Array
    kv_starts: Int32Array
    sampled: Int32Array
    rows: Int32Array
    positions: Int32Array

    @classmethod
    def of(cls, step: StepDescriptor) -> "SegmentIndex":
        row, start, count, samples = step.segments.T
        end = start + count
        q_starts, kv_starts = (
            np.concatenate(([0], values.cumsum())).astype(np.int32) for values in (count, end)
        )
        chosen = samples != 0
        return cls(q_starts, kv_starts, q_starts[1:][chosen] - 1, row[chosen], end[chosen])

    def arrays(self) -> tuple[Int32Array, ...]:
        return self.q_starts, self.kv_starts, self.sampled, self.rows, self.positions


class PrefillRunner:
    """Computes prefill segments. Owned by the engine thread.

    flashinfer  whose attention it is; None: torch's
    """

    def __init__(self, parts: Parts, flashinfer: FlashInferPrefill | None) -> None:
        self._parts, self._flashinfer = parts, flashinfer
        self._layer_elements = 0 if flashinfer is None else parts.model.layers[0].elements

    def run(self, index: SegmentIndex, staged: Sequence[Tensor], ids: Tensor) -> Tensor:
        """Writes ids [sampled by segments] int32; returns the hidden states, [tokens, hidden].

        staged  on the device: segments, prefill tokens, then the index's arrays
        """
        segments, tokens, q_starts, kv_starts, sampled, rows, sample_positions = staged
        parts, state = self._parts, self._parts.rows.step
        total, keys = len(tokens), int(index.kv_starts[-1])
        positions, slots = position_slots(segments, q_starts, total, False, state, parts.page_size)
        kv_slots = slots
        if keys > total:
            _, kv_slots = position_slots(segments, kv_starts, keys, True, state, parts.page_size)
        queries, lengths = np.diff(index.q_starts).tolist(), np.diff(index.kv_starts).tolist()
        plan = PrefillPlan(
            q_starts, kv_starts, kv_slots, list(zip(queries, lengths, strict=True)),
            self._planned(index),
        )  # fmt: skip
        batch = AttentionBatch(
            q_indptr=q_starts,
            kv_lens=segments[:, 1] + segments[:, 2],
            page_table=state.page_table,
            prefills=len(segments),
            decodes=0,
            plan=plan,
        )
        hidden = parts.model.hidden_states(tokens, positions, slots, parts.cache, batch)
        if len(sampled):
            parts.sample(ids, hidden.index_select(0, sampled), sample_positions, rows)
        return hidden

    def _planned(self, index: SegmentIndex) -> dict[int | None, Any] | None:
        """FlashInfer's plan for each window, where the step is long enough for it."""
        tokens = int(index.q_starts[-1])
        if self._flashinfer is None or tokens * self._layer_elements < _MOST_LAUNCH_BOUND:
            return None
        model, plan = self._parts.model, self._flashinfer.plan
        return {
            window: plan(index.q_starts, index.kv_starts, model.scale, window)
            for window in set(model.config.windows)
        }
