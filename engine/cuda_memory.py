"""How much of a device's memory is left for keys and values: measured, not estimated.

A trial executor with an empty pool runs the largest prefill and captures graphs; what that took is
kept free. Knows nothing of requests.
"""

import gc
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.cuda_executor import CudaExecutor
from engine.descriptor import StepDescriptor
from engine.flashinfer_prefill import FlashInferPrefill
from engine.models.decoder import Decoder


@dataclass(frozen=True, slots=True)
class StepBytes:
    """What steps need beside weights and pool."""

    free: int  # on the device, with the weights loaded and nothing else
    prefill: int  # the largest prefill, and the rows' state and buffers
    graphs: int

    @property
    def left(self) -> int:
        return max(0, self.free - self.prefill - self.graphs)


def measure_step_bytes(
    model: Decoder,
    *,
    page_size: int,
    max_rows: int,
    max_pages_per_row: int,
    prefill_tokens: int,
    buckets: Sequence[int],
    flashinfer: FlashInferPrefill | None,
) -> StepBytes:
    """Runs a trial; gives its memory back. Blocks. Compiles the kernels, too.

    prefill_tokens  most of one step
    buckets         numbers of rows that get a graph
    """
    free = _free_bytes(model.device)
    trial = CudaExecutor(
        model,
        pages=2,
        page_size=page_size,
        max_rows=max_rows,
        max_pages_per_row=max_pages_per_row,
        flashinfer=flashinfer,
    )
    prefill = largest_prefill(prefill_tokens, max_rows, max_pages_per_row * page_size)
    trial.launch_no_sync(prefill.encode()).wait_tokens_sync()
    left = [_free_bytes(model.device, empty=False)]
    for bucket in sorted(buckets, reverse=True)[:2]:
        trial.capture_graphs([bucket])
        left.append(_free_bytes(model.device, empty=False))
    # The largest brings the pool that all share; each further one costs what the second did.
    graphs = left[0] - left[-1]
    if len(left) > 2:
        further = len(buckets) - 2 + len(trial.small_step_buckets)
        graphs += further * max(0, left[1] - left[2])
    trial.close()
    del trial
    return StepBytes(_free_bytes(model.device), free - left[0], graphs)


def largest_prefill(tokens: int, max_rows: int, context: int) -> StepDescriptor:
    """`tokens` prefill tokens, or as many as fit, in as many segments as possible, all sampled.

    They go to page 0, whatever is there.
    """
    tokens = min(tokens, max_rows * context)
    segments = min(max_rows, tokens)
    counts = np.full(segments, tokens // segments, np.int32)
    counts[: tokens - int(counts.sum())] += 1
    rows, ones = np.arange(segments, dtype=np.int32), np.ones(segments, np.int32)
    return StepDescriptor(
        step=0,
        decode_rows=np.empty(0, np.int32),
        max_length=int(counts.max()),
        segments=np.stack([rows, np.zeros_like(rows), counts, ones], axis=1),
        prefill_tokens=np.zeros(tokens, np.int32),
    )


def _free_bytes(device: torch.device, empty: bool = True) -> int:
    torch.cuda.synchronize(device)
    if empty:
        gc.collect()
        torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info(device)[0])
