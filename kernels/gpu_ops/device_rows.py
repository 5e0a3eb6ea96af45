"""What a device keeps of each row between steps, and how a step descriptor changes it.

The CUDA kernels and the torch versions of the same are picked by the tensors' device. Knows no
model and nothing of streams: everything is launched on the current one, without synchronising.
"""

from dataclasses import dataclass

import numpy as np
import torch

from gpu_ops import cuda_step
from gpu_ops.cuda_decode import StepState
from gpu_ops.cuda_sampling import SamplingState
from gpu_ops.host_ring import COUNT_MASK, PLACES, HostRing
from gpu_ops.token_inputs import TokenInputs

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class DeviceRows:
    """The rows' state. The last row is the dummy row: greedy, and on page 0. Owned by the engine
    thread.

    decode_rows  [most rows a step decodes] int32, the current ones, then the dummy row
    """

    step: StepState
    sampling: SamplingState
    decode_rows: Tensor

    @classmethod
    def allocate(cls, rows: int, max_pages: int, device: torch.device) -> "DeviceRows":
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


class Changes:
    """A place on the device for step descriptors, and what applies the one that is there. Owned by
    the engine thread.

    block  int32, an encoded descriptor; rows and page table entries are named once in it
    """

    def __init__(self, block: Tensor, rows: DeviceRows) -> None:
        self._block, self._rows = block, rows
        self._launch = None
        if block.is_cuda:
            self._launch = cuda_step.changes_launch(
                block, rows.decode_rows, rows.step, rows.sampling
            )

    def apply(self, stream: int) -> None:
        """Makes the rows' state what the descriptor says, before its tokens are computed.

        stream  the handle of the one to launch on
        """
        if self._launch is not None:
            self._launch(stream)
        else:
            _apply(self._block, self._rows)


def apply_left(ring: HostRing, rows: DeviceRows) -> None:
    """Begins a decode launch: as `Changes.apply`, of what the host has left in the ring for it."""
    if rows.decode_rows.is_cuda:
        return cuda_step.apply_left(ring, rows.decode_rows, rows.step, rows.sampling)
    launch = int(ring.launches[0])
    _apply(ring.changes[launch % PLACES], rows)
    ring.launches[0] = launch + 1 & COUNT_MASK


def _apply(block: Tensor, rows: DeviceRows) -> None:
    """As the kernel in csrc/apply.cu, which says where what is."""
    flags, joins, writes, segments, tokens, decodes = block[3:9].tolist()
    state, sampling = rows.step, rows.sampling
    sizes = [16, 8 * joins, 3 * writes, 4 * segments, tokens]
    _, joined, page_writes, ranges, _, rest = block.tensor_split(np.cumsum(sizes).tolist())
    joined = joined.view(-1, 8)
    row, floats = joined[:, 0].long(), joined.view(torch.float32)
    sampling.temperature[row], sampling.top_k[row] = floats[:, 1], joined[:, 2]
    sampling.top_p[row], sampling.min_p[row] = floats[:, 3], floats[:, 4]
    sampling.seed_lo[row], sampling.seed_hi[row] = joined[:, 5], joined[:, 6]
    written, index, pages = page_writes.view(-1, 3).unbind(1)
    state.page_table[written.long(), index.long()] = pages
    segment_rows, start, count, _ = ranges.view(-1, 4).unbind(1)
    state.lengths[segment_rows.long()] = start + count
    if not flags & 1:
        rows.decode_rows.fill_(rows.dummy_row)
        rows.decode_rows[:decodes] = rest[:decodes]


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


def prepare_tokens(
    segments: Tensor,
    tokens: Tensor,
    decode_rows: Tensor,
    state: StepState,
    page_size: int,
    out: TokenInputs,
) -> None:
    """Writes `out` for the segments' tokens, then the decode rows', then the dummy row's.

    segments     [n, 4] int32; tokens [m] int32, theirs
    decode_rows  [d] int32; their lengths grow by one

    m + d is at most the length of `out`.
    """
    if segments.is_cuda:
        return cuda_step.prepare_tokens(segments, tokens, decode_rows, state, page_size, out)
    dummy_row, decodes = len(state.lengths) - 1, decode_rows.long()
    row, start, count, samples = segments.long().unbind(1)
    ends = count.cumsum(0)
    prompt_rows = row.repeat_interleave(count)
    positions = torch.arange(len(tokens)) + (start - ends + count).repeat_interleave(count)
    sampled = torch.full_like(prompt_rows, dummy_row)
    sampled[ends[samples != 0] - 1] = row[samples != 0]
    padding = torch.full((len(out.rows) - len(tokens) - len(decodes),), dummy_row)
    rows = torch.cat((prompt_rows, decodes, padding))
    positions = torch.cat((positions, state.lengths[decodes], torch.zeros_like(padding)))
    pages = state.page_table[rows, positions // page_size]
    pages[rows == dummy_row] = 0
    ids = torch.cat((tokens, state.last_token[decodes], torch.zeros_like(padding)))
    out.inputs.ids.copy_(ids)
    out.inputs.positions.copy_(positions)
    out.inputs.slots.copy_(pages * page_size + positions % page_size)
    out.inputs.kv_lens.copy_(positions + 1)
    out.rows.copy_(rows)
    out.sampled_rows.copy_(torch.cat((sampled, decodes, padding)))
    state.lengths[decodes] += 1


def gather_tokens(k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of the slots, each [n, kv_heads, head_dim]."""
    if k_cache.is_cuda:
        return cuda_step.gather_tokens(k_cache, v_cache, slots)
    keys, values = (cache.flatten(0, 1).index_select(0, slots) for cache in (k_cache, v_cache))
    return keys, values
