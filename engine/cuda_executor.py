"""Runs step descriptors on a CUDA device. Decides nothing.

Rules
- The rows' state lives on the device. A step of decode rows alone is one launch, and neither copy
  nor wait: its first kernel takes the changes from the host's memory, its last writes ids there
  (gpu_ops/host_ring.py). Whatever has prompts, special rows or very many changes is staged.
- Sampled ids stay on the device for the next step, which may be launched before the host has them.
- All that computes runs on the forward stream, in the order of the steps; copies between the tiers
  of the prefix cache on a stream of their own (engine/pager.py).
- Whatever needs memory is made in `__init__` or by `capture_graphs`, before the first step, but for
  what an eager prefill needs while it runs.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from threading import get_ident
from typing import Final

import numpy as np
import torch

from engine.attention import DecodeAttentions, has_decode_kernel
from engine.descriptor import HEADER_WORDS, SEGMENT_WORDS, StepDescriptor, decode
from engine.flashinfer_prefill import FlashInferPrefill
from engine.forward import AnySampler, DecodeRunner, Parts, PrefillRunner, SegmentIndex
from engine.graph_sizes import MOST_TOKENS
from engine.kv_cache import KvCache
from engine.models.decoder import Decoder
from engine.pager import Pager
from engine.redraw import Redraw
from engine.request import Int32Array
from engine.scoring import SampledScores, StepScores
from engine.small_steps import SmallStepRunner
from engine.staging import CollectedStep, ResultRing, Slot, StagingRing, host_ring
from engine.streams import CudaStreams, Streams
from gpu_ops.cuda_sampling import Sampler
from gpu_ops.device_rows import DeviceRows
from gpu_ops.host_ring import CHANGE_WORDS
from gpu_ops.logprobs import TokenLogprobs

_STAGED_TOKENS: Final = 32_768  # what most steps carry at most; a larger one gets larger buffers


class CudaExecutor:
    """An `Executor` that launches and goes on. Owned by the engine thread.

    pages              of the KV pool, the dummy page included
    max_pages_per_row  of the longest request
    host_slots         pages of the prefix cache's tier in host memory; 0: there is none
    sampler            None: the CUDA kernel
    flashinfer         computes prompts' attention; None: torch does
    small_step_tokens  most of a step that `SmallStepRunner` runs; None: as fits the model
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
        streams: Streams | None = None,
        sampler: AnySampler | None = None,
        small_step_tokens: int | None = None,
        flashinfer: FlashInferPrefill | None = None,
    ) -> None:
        device, vocabulary = model.device, model.config.vocab_size
        if small_step_tokens is None:
            with_kernel = has_decode_kernel(model.config, model.dtype, page_size, device)
            small_step_tokens = MOST_TOKENS if with_kernel else 0
        self.pages, self.page_size, self.vocab_size = pages, page_size, vocabulary
        self._streams: Streams = streams or CudaStreams(device)
        cache = KvCache.allocate(model.config, pages, page_size, model.dtype, device)
        self._pager = Pager(self._streams, cache, host_slots) if host_slots else None
        self._rows = DeviceRows.allocate(max_rows, max_pages_per_row, device)
        most = max(max_rows, small_step_tokens)
        parts = Parts(
            model, cache, page_size, self._rows, sampler or Sampler(most, vocabulary, device)
        )
        attentions = DecodeAttentions(model.config, model.dtype, page_size, most, device)
        self._results = ResultRing(self._streams, device, max_rows)
        ring = host_ring(self._streams, device, max_rows)
        self._decode = DecodeRunner(parts, attentions, ring)
        self._small = SmallStepRunner(parts, attentions, small_step_tokens)
        self._prefill = PrefillRunner(parts, flashinfer)
        words = _STAGED_TOKENS + 16 * max_rows + 3 * max_pages_per_row
        self._redraw = Redraw(parts, max_rows + 1)
        self._staging = StagingRing(self._streams, self._rows, words)
        self._decode_rows = np.empty(0, np.int32)
        self._thread = 0  # that launched last: in a server not the one that built
        if isinstance(self._streams, CudaStreams):
            # Weights, caches and rows were filled on the default stream: others do not wait for it.
            torch.cuda.synchronize()

    def capture_graphs(self, buckets: Sequence[int]) -> None:
        """CUDA graphs for decode steps of so many rows. Blocks until they are there."""
        with self._capturing():
            self._decode.capture(buckets, self._streams.forward)

    def capture_small_steps(self) -> None:
        """CUDA graphs for steps with few tokens. Blocks until they are there."""
        with self._capturing():
            self._small.capture(self._streams.forward, self._decode.graphs.pool)

    @property
    def small_step_buckets(self) -> tuple[int, ...]:
        return self._small.buckets

    @contextmanager
    def _capturing(self) -> Iterator[None]:
        assert isinstance(self._streams, CudaStreams)
        with torch.inference_mode(), self._streams.on(self._streams.forward):
            yield
        torch.cuda.synchronize()

    def launch_no_sync(self, descriptor: Int32Array) -> CollectedStep:
        """Starts the step. Raises ValueError where the block is not a descriptor."""
        step = decode(descriptor, self._decode_rows)
        if not step.same_decode_rows:
            self._decode_rows = step.decode_rows.copy()
        streams = self._streams
        if get_ident() != self._thread:
            self._thread = get_ident()
            streams.enter_thread()
        with torch.inference_mode(), streams.on(streams.forward):
            if self._pager is not None:
                self._pager.copy_no_sync(step.copies)
            ids = self._results.take()
            self._redraw.apply(step)
            changes = self._changes_of_decode(descriptor, step)
            if changes is None:
                return self._results.send(step.sampled, self._run(descriptor, step, ids))
            decodes = len(step.decode_rows)
            launch = self._decode.run(decodes, changes)
            return self._results.follow(partial(self._decode.ring.read, launch, decodes))

    def close(self) -> None:
        """Waits for the device. Memory goes with the object."""
        if isinstance(self._streams, CudaStreams):
            torch.cuda.synchronize()
        if self._pager is not None:
            self._pager.close()

    def _changes_of_decode(self, block: Int32Array, step: StepDescriptor) -> Int32Array | None:
        """What the decode graph needs to know of a step that is one launch of it and nothing else:
        rows that decode, none of them special, and no more changes than fit. None: it is more."""
        if not step.decode_rows.size or step.segments.size or self._redraw.is_needed:
            return None
        words = HEADER_WORDS + step.joined.size + step.page_writes.size
        words += 0 if step.same_decode_rows else step.decode_rows.size
        return block[:words] if words <= CHANGE_WORDS else None

    def _run(self, block: Int32Array, step: StepDescriptor, ids: torch.Tensor) -> StepScores:
        """Ids of the prefill segments that sample, then of the decode rows."""
        index = SegmentIndex.of(step) if len(step.segments) else None
        if index is not None and self._small.takes(step):
            return self._run_small(block, step, index, ids)
        slot = None if _changes_nothing(step) else self._apply(block, index)
        decodes = len(step.decode_rows)
        from_prefill = 0 if index is None else len(index.sampled)
        of_decode: tuple[SampledScores, ...] = ()
        of_prefill: tuple[SampledScores, ...] = ()
        prompts: tuple[tuple[int, TokenLogprobs], ...] = ()
        if decodes:
            # First: while its graph runs, the host launches the prefill.
            self._decode.run(decodes)
            if self._redraw.is_needed:
                of_decode = self._redraw.run(
                    step, step.decode_rows, self._decode.hidden, self._decode.positions(decodes),
                    self._decode.ids[:decodes], from_prefill,
                )  # fmt: skip
            self._streams.copy(
                ids.data_ptr() + 4 * from_prefill, self._decode.ids.data_ptr(), 4 * decodes,
                self._streams.forward,
            )  # fmt: skip
        if index is not None:
            assert slot is not None
            staged, drawn = _staged(slot.device, step, index), ids[:from_prefill]
            hidden = self._prefill.run(index, staged, drawn)
            of_prefill, prompts = self._redraw.run_prefill(step, index, staged, hidden, drawn)
        if slot is not None:
            slot.read.record(self._streams.forward)
        return StepScores((*of_prefill, *of_decode), prompts)

    def _run_small(
        self, block: Int32Array, step: StepDescriptor, index: SegmentIndex, ids: torch.Tensor
    ) -> StepScores:
        """As `_run`, prompts and decode rows together."""
        slot = self._apply(block, index)
        staged, decodes = _staged(slot.device, step, index), len(step.decode_rows)
        segments, tokens, _, _, sampled, *_ = staged
        self._small.run(segments, tokens, self._rows.decode_rows[:decodes])
        drawn, hidden = self._small.ids, self._small.hidden
        prompt_tokens, from_prefill = len(tokens), len(index.sampled)
        end = prompt_tokens + decodes
        if from_prefill:
            torch.index_select(drawn, 0, sampled, out=ids[:from_prefill])
        if decodes:
            self._streams.copy(
                ids.data_ptr() + 4 * from_prefill, drawn.data_ptr() + 4 * prompt_tokens,
                4 * decodes, self._streams.forward,
            )  # fmt: skip
        of_decode = self._redraw.run(
            step, step.decode_rows, hidden[prompt_tokens:end],
            self._small.positions(prompt_tokens, end), ids[from_prefill : from_prefill + decodes],
            from_prefill,
        )  # fmt: skip
        of_prefill, prompts = self._redraw.run_prefill(
            step, index, staged, hidden[:prompt_tokens], ids[:from_prefill]
        )
        slot.read.record(self._streams.forward)
        return StepScores((*of_prefill, *of_decode), prompts)

    def _apply(self, block: Int32Array, index: SegmentIndex | None) -> Slot:
        """The step's changes, in the rows' state."""
        slot = self._staging.send((block,) if index is None else (block, *index.arrays()))
        slot.changes.apply(self._streams.forward.cuda_stream)
        return slot


def _changes_nothing(step: StepDescriptor) -> bool:
    parts = (step.joined, step.page_writes, step.segments)  # rules and masks are no kernel's
    return step.same_decode_rows and not any(part.size for part in parts)


def _staged(device: torch.Tensor, step: StepDescriptor, index: SegmentIndex) -> list[torch.Tensor]:
    """What `PrefillRunner.run` reads: a staged block's segments and tokens, the index's arrays."""
    skipped = HEADER_WORDS + step.joined.size + step.page_writes.size
    skipped_too = 0 if step.same_decode_rows else step.decode_rows.size
    skipped_too += step.rules.size + step.mask_rows.size + step.masks.size
    skipped_too += step.copies.words.size
    arrays = [step.segments, step.prefill_tokens, *index.arrays()]
    sizes = [
        skipped,
        arrays[0].size,
        arrays[1].size,
        skipped_too,
        *(part.size for part in arrays[2:]),
    ]
    _, segments, tokens, _, *rest = torch.split(device[: sum(sizes)], sizes)
    return [segments.view(-1, SEGMENT_WORDS), tokens, *rest]
