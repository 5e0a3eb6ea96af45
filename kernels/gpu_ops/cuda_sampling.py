"""`ops.sample` on CUDA: one launch, no synchronisation, the workspace held by a `Sampler`."""

import functools
from dataclasses import dataclass
from typing import Final

import torch

from gpu_ops.cuda_launch import Kernel, kernel
from gpu_ops.cuda_ops import element_bytes
from gpu_ops.host_ring import RING_MACROS, HostRing

Tensor = torch.Tensor

_THREADS: Final = 256  # as in csrc/sample.cu
_CHUNK_BYTES: Final = _THREADS * 128
_WIDEST: Final = 4  # bytes of a logit
_MAX_CHUNKS: Final = _THREADS
_SUM_WORDS: Final = 4


@dataclass(frozen=True, slots=True)
class SamplingState:
    """Parameters of the sampled rows, as `ops.sample` takes them; all on one device."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed_lo: Tensor
    seed_hi: Tensor


class Sampler:
    """Samples up to `max_rows` rows of logits at once. Owned by the engine thread.

    Its workspace is shared by all its calls, which must run on one stream.
    """

    def __init__(self, max_rows: int, vocabulary: int, device: torch.device) -> None:
        chunks = _chunks(vocabulary, _WIDEST)
        if chunks > _MAX_CHUNKS:
            limit = _MAX_CHUNKS * _CHUNK_BYTES // _WIDEST
            raise ValueError(f"a vocabulary of {vocabulary} ids is over the kernel's {limit}")
        self._sums = torch.empty((max_rows, chunks, _SUM_WORDS), dtype=torch.int32, device=device)
        self._maxima = torch.empty((max_rows, chunks, _THREADS), device=device)
        self._arrived = torch.zeros(max_rows, dtype=torch.int32, device=device)

    def sample_into(
        self,
        ids: Tensor,
        logits: Tensor,
        state: SamplingState,
        position: Tensor,
        rows: Tensor | None = None,
        last_token: Tensor | None = None,
        ring: HostRing | None = None,
    ) -> None:
        """ids[i] = a token id for logits[i]; with `rows`, last_token[rows[i]] = it too.

        ids         [n] int32, written
        logits      [n, v] bf16 or float32, v contiguous
        state       per row of logits, or with `rows` indexed by rows[i]
        position    [n] int32, the sampled token's index in its sequence
        rows        [n] int32
        last_token  [rows of the state] int32, written
        ring        where the ids go, too, for the host: of the launch that `apply_left` began
        """
        n, vocabulary = logits.shape
        if n > len(self._arrived):
            raise ValueError(f"{n} rows of logits, but room for {len(self._arrived)}")
        if n:
            width = element_bytes(logits)
            _sample(width).launch(
                (_chunks(vocabulary, width), n), _THREADS,
                logits.data_ptr(), 0 if rows is None else rows.data_ptr(),
                state.temperature.data_ptr(), state.top_k.data_ptr(), state.top_p.data_ptr(),
                state.min_p.data_ptr(), state.seed_lo.data_ptr(), state.seed_hi.data_ptr(),
                position.data_ptr(), ids.data_ptr(),
                0 if last_token is None else last_token.data_ptr(),
                self._sums.data_ptr(), self._maxima.data_ptr(), self._arrived.data_ptr(),
                vocabulary, logits.stride(0), *_ring_arguments(ring, n),
                shared_bytes=2 * _CHUNK_BYTES,
            )  # fmt: skip


def _ring_arguments(ring: HostRing | None, rows: int) -> tuple[int, int, int]:
    if ring is None:
        return 0, 0, 0
    if rows > ring.ids.shape[1]:
        raise ValueError(f"{rows} rows of ids, but room for {ring.ids.shape[1]} on the host")
    return ring.ids.data_ptr(), ring.ids.shape[1], ring.launches.data_ptr()


def _chunks(vocabulary: int, element_bytes: int) -> int:
    return -(-vocabulary * element_bytes // _CHUNK_BYTES)


@functools.cache
def _sample(element_bytes: int) -> Kernel:
    macros = {"ELEMENT_BYTES": element_bytes, **RING_MACROS}
    run = kernel("sample.cu", "sample", "P" * 14 + "iiPiP", macros)
    return run.allow_shared(2 * _CHUNK_BYTES)


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed_lo: Tensor,
    seed_hi: Tensor,
    position: Tensor,
) -> Tensor:
    """As `ops.sample`. Allocates its workspace: a decode loop keeps a `Sampler` instead."""
    ids = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
    state = SamplingState(temperature, top_k, top_p, min_p, seed_lo, seed_hi)
    sampler = Sampler(max(len(logits), 1), logits.shape[1], logits.device)
    sampler.sample_into(ids, logits, state, position)
    return ids
