"""The operations of `device_rows.py` on CUDA tensors; signatures and meaning are there."""

import functools
from typing import Final

import torch

from gpu_ops.cuda_decode import StepState
from gpu_ops.cuda_launch import BoundLaunch, Kernel, kernel, multiprocessors
from gpu_ops.cuda_sampling import SamplingState
from gpu_ops.host_ring import CHANGE_WORDS, RING_MACROS, HostRing
from gpu_ops.token_inputs import TokenInputs

Tensor = torch.Tensor

_THREADS: Final = 256
_CHANGE_BLOCKS: Final = 8
_CHANGES: Final = "PPPiiPiPPPPPPP"  # parameters of apply_changes


@functools.cache
def _kernel(name: str, parameters: str) -> Kernel:
    return kernel("apply.cu", name, parameters, RING_MACROS)


def changes_launch(
    block: Tensor, decode_rows: Tensor, state: StepState, sampling: SamplingState
) -> BoundLaunch:
    """`device_rows.Changes.apply` of the descriptor that is in `block` when it runs."""
    arguments = block.data_ptr(), 0, *_rows_arguments(decode_rows, state, sampling)
    return _kernel("apply_changes", _CHANGES).bind((_CHANGE_BLOCKS, 1), _THREADS, *arguments)


def apply_left(
    ring: HostRing, decode_rows: Tensor, state: StepState, sampling: SamplingState
) -> None:
    """As `device_rows.apply_left`."""
    _kernel("apply_changes", _CHANGES).launch(
        (1, 1), CHANGE_WORDS // 4, ring.changes.data_ptr(), ring.launches.data_ptr(),
        *_rows_arguments(decode_rows, state, sampling),
    )  # fmt: skip


def _rows_arguments(
    decode_rows: Tensor, state: StepState, sampling: SamplingState
) -> tuple[int, ...]:
    return (
        decode_rows.data_ptr(), len(decode_rows), len(state.lengths) - 1,
        state.page_table.data_ptr(), state.page_table.shape[1], state.lengths.data_ptr(),
        sampling.temperature.data_ptr(), sampling.top_k.data_ptr(), sampling.top_p.data_ptr(),
        sampling.min_p.data_ptr(), sampling.seed_lo.data_ptr(), sampling.seed_hi.data_ptr(),
    )  # fmt: skip


def position_slots(
    segments: Tensor, starts: Tensor, total: int, whole: bool, state: StepState, page_size: int
) -> tuple[Tensor, Tensor]:
    """As `device_rows.position_slots`."""
    out = torch.empty((2, total), dtype=torch.int32, device=segments.device)
    positions, slots = out.unbind(0)
    _kernel("position_slots", "PPiiiPiiPP").launch(
        (-(-total // _THREADS), 1), _THREADS,
        segments.data_ptr(), starts.data_ptr(), len(segments), total, int(whole),
        state.page_table.data_ptr(), state.page_table.shape[1], page_size,
        positions.data_ptr(), slots.data_ptr(),
    )  # fmt: skip
    return positions, slots


def prepare_tokens(
    segments: Tensor,
    tokens: Tensor,
    decode_rows: Tensor,
    state: StepState,
    page_size: int,
    out: TokenInputs,
) -> None:
    """As `device_rows.prepare_tokens`."""
    inputs = out.inputs
    _kernel("prepare_tokens", "PPiPiiiPPPiiPPPPPP").launch(
        (1, 1), len(out.rows),
        segments.data_ptr(), tokens.data_ptr(), len(tokens), decode_rows.data_ptr(),
        len(decode_rows), len(out.rows), len(state.lengths) - 1, state.last_token.data_ptr(),
        state.lengths.data_ptr(), state.page_table.data_ptr(), state.page_table.shape[1],
        page_size, inputs.ids.data_ptr(), inputs.positions.data_ptr(), inputs.slots.data_ptr(),
        inputs.kv_lens.data_ptr(), out.rows.data_ptr(), out.sampled_rows.data_ptr(),
    )  # fmt: skip


def gather_tokens(k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """As `device_rows.gather_tokens`. A token's keys are a multiple of 16 bytes."""
    heads, head_dim = k_cache.shape[-2:]
    token_bytes = heads * head_dim * k_cache.element_size()
    if token_bytes % 16:
        raise ValueError(f"a token's keys are {token_bytes} bytes; the kernel moves 16 at a time")
    tokens = len(slots)
    out = torch.empty((2, tokens, heads, head_dim), dtype=k_cache.dtype, device=k_cache.device)
    vectors = token_bytes // 16
    blocks = min(-(-tokens * vectors // _THREADS), 8 * multiprocessors(k_cache.device))
    _kernel("gather_tokens", "PPPiiP").launch(
        (blocks, 2), _THREADS,
        k_cache.data_ptr(), v_cache.data_ptr(), slots.data_ptr(), tokens, vectors, out.data_ptr(),
    )  # fmt: skip
    return out[0], out[1]
