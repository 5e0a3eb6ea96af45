"""Runs step descriptors on the CPU. Decides nothing: what happens in a step is the descriptor's.

The per-row state that a GPU keeps in its memory is kept here in numpy arrays of the same meaning.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from engine.descriptor import StepDescriptor, decode
from engine.host_pages import HostPages, copy_rows_at_once
from engine.kv_cache import KvCache
from engine.logprobs import StepLogprobs
from engine.models.decoder import Decoder
from engine.request import Int32Array
from engine.scoring import StepScores
from engine.special_rows import SpecialRows
from gpu_ops import ops
from gpu_ops.batch import AttentionBatch
from gpu_ops.cpu_attention import plan_attention


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """A step that was computed while it was launched. Owned by the engine thread."""

    token_ids: Int32Array
    scores: StepScores

    def wait_tokens_sync(self) -> Int32Array:
        return self.token_ids

    def wait_logprobs_sync(self) -> StepLogprobs | None:
        return self.scores.to_host_sync()


class CpuRows:
    """What a device remembers of each row between steps. Owned by the engine thread.

    The last row is the dummy row, for padding. All arrays are [rows] but for the page table.
    """

    def __init__(self, rows: int, max_pages: int) -> None:
        self.page_table = np.zeros((rows, max_pages), np.int32)
        self.length = np.zeros(rows, np.int32)  # tokens whose keys and values are in the cache
        self.last_token = np.zeros(rows, np.int32)
        self.temperature = np.zeros(rows, np.float32)
        self.top_k = np.zeros(rows, np.int32)
        self.top_p = np.ones(rows, np.float32)
        self.min_p = np.zeros(rows, np.float32)
        self.seed_lo = np.zeros(rows, np.int32)
        self.seed_hi = np.zeros(rows, np.int32)

    def apply(self, step: StepDescriptor) -> None:
        """The descriptor's changes: rows that joined, pages that were given."""
        joined = step.joined
        if len(joined):
            rows, bits = joined[:, 0], np.ascontiguousarray(joined.T)
            self.temperature[rows] = bits[1].view(np.float32)
            self.top_k[rows] = bits[2]
            self.top_p[rows] = bits[3].view(np.float32)
            self.min_p[rows] = bits[4].view(np.float32)
            self.seed_lo[rows], self.seed_hi[rows] = bits[5], bits[6]
        if len(step.page_writes):
            rows, index, pages = step.page_writes.T
            self.page_table[rows, index] = pages


@dataclass(frozen=True, slots=True)
class _Work:
    """A step's tokens, and which of them are sampled from.

    token_ids, positions, rows  [tokens] int32, prefill segments first
    sequence_rows               [sequences] int32
    q_indptr                    [sequences + 1] int32
    sampled                     [sampled] indices of tokens
    """

    token_ids: Int32Array
    positions: Int32Array
    rows: Int32Array
    sequence_rows: Int32Array
    q_indptr: Int32Array
    sampled: NDArray[np.intp]


class CpuExecutor:
    """An `Executor` whose steps are finished when `launch_no_sync` returns. Owned by the engine
    thread.

    pages              of the KV pool, the dummy page included
    max_pages_per_row  of the longest request
    host_slots         pages of the prefix cache's tier in host memory; 0: there is none
    threads            torch's, for the whole process; None leaves them as they are
    """

    def __init__(
        self,
        model: Decoder,
        *,
        pages: int,
        page_size: int,
        max_rows: int,
        max_pages_per_row: int,
        host_slots: int = 0,
        threads: int | None = None,
    ) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        self.pages, self.page_size = pages, page_size
        self.vocab_size = model.config.vocab_size
        self._model = model
        self._windows = frozenset(model.config.windows)
        self._cache = KvCache.allocate(model.config, pages, page_size, model.dtype, "cpu")
        self._host = HostPages(self._cache, host_slots, copy_rows_at_once) if host_slots else None
        self._state = CpuRows(max_rows + 1, max_pages_per_row)
        self._special = SpecialRows(model, max_rows + 1)
        self._decode_rows = np.empty(0, np.int32)

    def launch_no_sync(self, descriptor: Int32Array) -> FinishedStep:
        """Computes the step. Raises ValueError where the block is not a descriptor."""
        step = decode(descriptor, self._decode_rows)
        if not step.same_decode_rows:
            self._decode_rows = step.decode_rows.copy()
        if self._host is not None:
            self._host.copy(step.copies.words)
        self._state.apply(step)
        self._special.apply(step)
        work = self._work(step)
        self._state.length[work.sequence_rows] = work.positions[work.q_indptr[1:] - 1] + 1
        if work.token_ids.size == 0:
            return FinishedStep(work.token_ids, StepScores((), ()))
        with torch.inference_mode():
            return self._run(step, work)

    def close(self) -> None:
        """Nothing to give back: memory goes with the object."""

    def _work(self, step: StepDescriptor) -> _Work:
        state, decode_rows = self._state, step.decode_rows
        segment_rows, starts, counts, samples = step.segments.T
        ends = counts.cumsum()
        prefill = int(counts.sum())
        # Positions of a segment's tokens run on from its start.
        offsets = np.arange(prefill) - (ends - counts).repeat(counts)
        lengths = state.length[decode_rows]
        decode_tokens = np.arange(prefill, prefill + len(decode_rows))
        q_indptr = np.concatenate(([0], ends, decode_tokens + 1))
        return _Work(
            token_ids=np.concatenate((step.prefill_tokens, state.last_token[decode_rows])),
            positions=np.concatenate((starts.repeat(counts) + offsets, lengths)).astype(np.int32),
            rows=np.concatenate((segment_rows.repeat(counts), decode_rows)),
            sequence_rows=np.concatenate((segment_rows, decode_rows)),
            q_indptr=q_indptr.astype(np.int32),
            sampled=np.concatenate((ends[samples != 0] - 1, decode_tokens)),
        )

    def _run(self, step: StepDescriptor, work: _Work) -> FinishedStep:
        """Forward pass and sampling; the token ids are also stored as the rows' last tokens."""
        hidden = self._model.hidden_states(
            torch.from_numpy(work.token_ids),
            torch.from_numpy(work.positions),
            torch.from_numpy(self._slots(work)),
            self._cache,
            self._batch(step, work),
        )
        prompts = self._special.prompt_scores(step, hidden)
        if work.sampled.size == 0:
            return FinishedStep(np.empty(0, np.int32), StepScores((), prompts))
        if work.sampled.size < len(hidden):
            hidden = hidden[torch.from_numpy(work.sampled)]
        rows = work.rows[work.sampled]
        if self._can_skip_logits(rows):
            token_ids: Int32Array = self._model.greedy(hidden).numpy()
            self._state.last_token[rows] = token_ids
            return FinishedStep(token_ids, StepScores((), prompts))
        logits = self._model.logits(hidden)
        token_ids = self._draw(logits, rows, step)
        self._state.last_token[rows] = token_ids
        sampled = self._special.sampled_scores(logits, torch.from_numpy(token_ids), rows)
        return FinishedStep(token_ids, StepScores(sampled, prompts))

    def _can_skip_logits(self, rows: Int32Array) -> bool:
        """Whether ranks need not give each other all logits: where each row takes its largest."""
        if self._model.group is None:
            return False
        is_greedy = not self._state.temperature[rows].any()
        return is_greedy and not self._special.concerns(rows).any()

    def _slots(self, work: _Work) -> Int32Array:
        pages = self._state.page_table[work.rows, work.positions // self.page_size]
        return pages * self.page_size + work.positions % self.page_size

    def _batch(self, step: StepDescriptor, work: _Work) -> AttentionBatch:
        kv_lens = self._state.length[work.sequence_rows]
        pages = -(-int(kv_lens.max()) // self.page_size)
        batch = AttentionBatch(
            q_indptr=torch.from_numpy(work.q_indptr),
            kv_lens=torch.from_numpy(kv_lens),
            page_table=torch.from_numpy(self._state.page_table[work.sequence_rows, :pages]),
            prefills=len(step.segments),
            decodes=len(step.decode_rows),
        )
        return plan_attention(batch, self._cache.keys[0], self._windows)

    def _draw(self, logits: torch.Tensor, rows: Int32Array, step: StepDescriptor) -> Int32Array:
        """[sampled] ids: for the rows with rules from logits as those make them."""
        ruled = self._special.ruled(rows)
        if not ruled.any():
            return self._sample(logits, rows)
        drawn = np.empty(len(rows), np.int32)
        if not ruled.all():
            drawn[~ruled] = self._sample(logits[torch.from_numpy(~ruled)], rows[~ruled])
        ruled_rows, positions = rows[ruled], torch.from_numpy(self._state.length[rows[ruled]])
        adjusted = self._special.adjusted(
            logits[torch.from_numpy(ruled)], step, ruled_rows, positions
        )
        drawn[ruled] = self._sample(adjusted, ruled_rows)
        self._special.count(ruled_rows, torch.from_numpy(drawn[ruled]))
        return drawn

    def _sample(self, logits: torch.Tensor, rows: Int32Array) -> Int32Array:
        """The sampled token's index in its sequence is the row's length after the step."""
        state = self._state
        parameters = (
            state.temperature,
            state.top_k,
            state.top_p,
            state.min_p,
            state.seed_lo,
            state.seed_hi,
            state.length,
        )
        ids = ops.sample(logits, *(torch.from_numpy(values[rows]) for values in parameters))
        token_ids: Int32Array = ids.numpy()
        return token_ids
