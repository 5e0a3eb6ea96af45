"""Runs step descriptors on a CUDA device. Decides nothing.

Rules
- The rows' state lives on the device; a step without changes needs no copy from the host.
- Sampled ids stay on the device for the next step, which may be launched before the host has them.
- All that computes runs on the forward stream, in the order of the steps.
- Whatever needs memory is made in `__init__` or by `capture_graphs`, before the first step, but for
  what an eager prefill needs while it runs.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

from engine.attention import DecodeAttentions
from engine.descriptor import StepDescriptor, decode
from engine.forward import AnySampler, DecodeRunner, Parts, PrefillRunner, SegmentIndex
from engine.kv_cache import KvCache
from engine.models.decoder import Decoder
from engine.request import Int32Array
from engine.staging import CollectedStep, ResultRing, Staged, StagingRing
from engine.streams import CudaStreams, Streams
from gpu_ops.cuda_sampling import Sampler
from gpu_ops.row_state import Changes, RowTensors, apply_changes

_STAGED_TOKENS: Final = 32_768  # what most steps carry at most; a larger one gets larger buffers


class CudaExecutor:
    """An `Executor` that launches and goes on. Owned by the engine thread.

    pages              of the KV pool, the dummy page included
    max_pages_per_row  of the longest request
    sampler            None: the CUDA kernel
    """

    def __init__(
        self,
        model: Decoder,
        *,
        pages: int,
        page_size: int,
        max_rows: int,
        max_pages_per_row: int,
        streams: Streams | None = None,
        sampler: AnySampler | None = None,
    ) -> None:
        device, vocabulary = model.device, model.config.vocab_size
        self.pages, self.page_size, self.vocab_size = pages, page_size, vocabulary
        self._streams: Streams = streams or CudaStreams(device)
        cache = KvCache.allocate(model.config, pages, page_size, model.dtype, device)
        self._rows = RowTensors.allocate(max_rows, max_pages_per_row, device)
        parts = Parts(
            model, cache, page_size, self._rows, sampler or Sampler(max_rows, vocabulary, device)
        )
        attentions = DecodeAttentions(model.config, model.dtype, page_size, max_rows, device)
        self._decode = DecodeRunner(parts, attentions)
        self._prefill = PrefillRunner(parts)
        words = _STAGED_TOKENS + 16 * max_rows + 3 * max_pages_per_row
        self._staging = StagingRing(self._streams, device, words)
        self._results = ResultRing(self._streams, device, max_rows)
        self._decode_rows = np.empty(0, np.int32)

    def capture_graphs(self, buckets: Sequence[int]) -> None:
        """CUDA graphs for decode steps of so many rows. Blocks until they are there."""
        assert isinstance(self._streams, CudaStreams)
        with torch.inference_mode(), self._streams.on(self._streams.forward):
            self._decode.capture(buckets, self._streams.forward)
        torch.cuda.synchronize()

    def launch_no_sync(self, descriptor: Int32Array) -> CollectedStep:
        """Starts the step. Raises ValueError where the block is not a descriptor."""
        step = decode(descriptor, self._decode_rows)
        if not step.same_decode_rows:
            self._decode_rows = step.decode_rows.copy()
        streams = self._streams
        with torch.inference_mode(), streams.on(streams.forward):
            ids = self._results.take()
            self._run(step, ids)
            return self._results.send(step.sampled)

    def close(self) -> None:
        """Waits for the device. Memory goes with the object."""
        if isinstance(self._streams, CudaStreams):
            torch.cuda.synchronize()

    def _run(self, step: StepDescriptor, ids: torch.Tensor) -> None:
        """Ids of the prefill segments that sample, then of the decode rows."""
        segments = len(step.segments)
        index = SegmentIndex.of(step) if segments else None
        staged = self._apply(step, index)
        decodes = len(step.decode_rows)
        from_prefill = 0 if index is None else len(index.sampled)
        if decodes:
            # First: while its graph runs, the host launches the prefill.
            sampled = self._decode.run(decodes)
            ids[from_prefill : from_prefill + decodes].copy_(sampled)
        if index is not None:
            assert staged is not None
            self._prefill.run(index, staged.sections[2:-1], ids[:from_prefill])
        if staged is not None:
            staged.release(self._streams.forward)

    def _apply(self, step: StepDescriptor, index: SegmentIndex | None) -> Staged | None:
        """The step's changes, in the rows' state; None where there are none."""
        same = step.same_decode_rows
        if same and index is None and not len(step.joined) and not len(step.page_writes):
            return None
        parts = [step.joined, step.page_writes, step.segments]
        if index is not None:
            parts += [step.prefill_tokens, *index.arrays()]
        staged = self._staging.send([*parts, step.decode_rows[:0] if same else step.decode_rows])
        joined, page_writes, segments, *_, decode_rows = staged.sections
        changes = Changes(joined, page_writes, segments, None if same else decode_rows)
        apply_changes(changes, self._rows)
        return staged
