"""What a device keeps of each row between steps, and how a step descriptor changes it.

The CUDA kernels and the torch versions of the same are picked by the tensors' device. Knows no
model and nothing of streams: everything is launched on the current one, without synchronising.
"""

from dataclasses import dataclass

import torch

from gpu_ops import cuda_step
from gpu_ops.cuda_decode import StepState
from gpu_ops.cuda_sampling import SamplingState

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class RowTensors:
    """The rows' state. The last row is the dummy row: greedy, and on page 0. Owned by the engine
    thread.

    decode_rows  [most rows a step decodes] int32, the current ones, then the dummy row
    """

    step: StepState
    sampling: SamplingState
    decode_rows: Tensor

    @classmethod
    def allocate(cls, rows: int, max_pages: int, device: torch.device) -> "RowTensors":
        """For `rows` rows and the dummy row."""

        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        count = rows + 1
        floats = torch.zeros((3, count), dtype=torch.float32, device=device)
        floats[1] = 1.0
        temperature, top_p, min_p = floats.unbind(0)
        sampling = SamplingState(temperature, ints(count), top_p, min_p, ints(count), ints(count))
        step = StepState(ints(count), ints(count), ints(count, max_pages))
        return cls(step, sampling, torch.full_like(ints(rows), rows))

    @property
    def dummy_row(self) -> int:
        return len(self.step.lengths) - 1


@dataclass(frozen=True, slots=True)
class Changes:
    """The sections of a step descriptor, on the device. Rows and table entries are named once.

    joined       [n, 8] int32
    page_writes  [n, 3] int32
    segments     [n, 4] int32
    decode_rows  [n] int32; None: those of the step before
    """

    joined: Tensor
    page_writes: Tensor
    segments: Tensor
    decode_rows: Tensor | None


def apply_changes(changes: Changes, rows: RowTensors) -> None:
    """Makes the rows' state what the descriptor says, before its tokens are computed."""
    if rows.decode_rows.is_cuda:
        cuda_step.apply_changes(
            changes.joined, changes.page_writes, changes.segments, changes.decode_rows,
            rows.decode_rows, rows.step, rows.sampling,
        )  # fmt: skip
        return
    state, sampling, joined = rows.step, rows.sampling, changes.joined
    row, floats = joined[:, 0].long(), joined.view(torch.float32)
    sampling.temperature[row], sampling.top_k[row] = floats[:, 1], joined[:, 2]
    sampling.top_p[row], sampling.min_p[row] = floats[:, 3], floats[:, 4]
    sampling.seed_lo[row], sampling.seed_hi[row] = joined[:, 5], joined[:, 6]
    written, index, pages = changes.page_writes.unbind(1)
    state.page_table[written.long(), index.long()] = pages
    segment_rows, start, count, _ = changes.segments.unbind(1)
    state.lengths[segment_rows.long()] = start + count
    if changes.decode_rows is not None:
        rows.decode_rows.fill_(rows.dummy_row)
        rows.decode_rows[: len(changes.decode_rows)] = changes.decode_rows


def position_slots(
    segments: Tensor, starts: Tensor, total: int, whole: bool, state: StepState, page_size: int
) -> tuple[Tensor, Tensor]:
    """Positions of the segments, one after another, and their slots in the cache: [total] int32.

    segments  [n, 4] int32
    starts    [n + 1] int32: where each segment's positions begin among the total
    whole     from position 0 on, not only those that the segment computes
    """
    if segments.is_cuda:
        return cuda_step.position_slots(segments, starts, total, whole, state, page_size)
    index = torch.arange(total, dtype=torch.int32)
    run = torch.searchsorted(starts[:-1].contiguous(), index, right=True) - 1
    begin = torch.zeros_like(segments[:, 1]) if whole else segments[:, 1]
    positions = index - starts[run] + begin[run]
    pages = state.page_table[segments[run, 0].long(), (positions // page_size).long()]
    return positions, pages * page_size + positions % page_size


def gather_tokens(k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of the slots, each [n, kv_heads, head_dim]."""
    if k_cache.is_cuda:
        return cuda_step.gather_tokens(k_cache, v_cache, slots)
    keys, values = (cache.flatten(0, 1).index_select(0, slots) for cache in (k_cache, v_cache))
    return keys, values
