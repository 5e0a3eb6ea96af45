"""Decode attention on CUDA, and the kernel that prepares a decode step.

`DecodeAttention` shares a step's keys out evenly over the multiprocessors, whatever the sequences'
lengths: a plan made on the device once a step, that every layer follows. Nothing is planned on the
host, so a captured graph serves any lengths.
"""

import functools
from dataclasses import dataclass
from typing import Final

import torch

from gpu_ops.cuda_launch import Kernel, kernel, multiprocessors

Tensor = torch.Tensor

TILE: Final = 16  # keys, as in csrc/plan.cuh
_SHARED_BYTES: Final = 232_448  # a block's limit on sm_90 and sm_100
_RING_BYTES_PER_STAGE: Final = 2 * 8 + 48  # two barriers and what the tile is
_MAX_STAGES: Final = 16
_SEQUENCE_WORDS: Final = 8  # of the plan, as in csrc/plan.cuh
_SPAN_WORDS: Final = 12
_STREAMERS: Final = 4  # as in csrc/decode_attention.cu


@dataclass(frozen=True, slots=True)
class DecodeTuning:
    """How the work is shared out; `decode_tuning` chooses."""

    heads_per_block: int  # key-value heads; divides their number
    blocks_per_multiprocessor: int = 1
    min_tiles: int = 1  # that a block takes
    ring_bytes: int = _SHARED_BYTES  # at most, per multiprocessor: the rest is for the next kernel


FEW_ROWS: Final = 31  # up to so many, `decode_tuning` differs


def decode_tuning(rows: int, q_heads: int, kv_heads: int) -> DecodeTuning:
    """The fastest found for up to `rows` sequences (perf/LOG.md): few share their heads out too.

    One head to a block saves a microsecond at one short sequence and costs 80 at a long one.
    """
    few = rows <= FEW_ROWS
    most = 2 if few else 8 if q_heads // kv_heads <= 5 else 4
    heads = max(heads for heads in range(1, most + 1) if kv_heads % heads == 0)
    return DecodeTuning(heads, 2 if few else 1, ring_bytes=160_000)


@dataclass(frozen=True, slots=True)
class StepState:
    """What the device keeps of its rows between steps. The last row is the dummy row.

    lengths     [rows] int32: tokens whose keys are stored
    last_token  [rows] int32: sampled last, and not yet computed
    page_table  [rows, max_pages] int32
    """

    lengths: Tensor
    last_token: Tensor
    page_table: Tensor


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """What a prepared decode step reads, each [n] int32; written anew every step."""

    ids: Tensor
    positions: Tensor
    slots: Tensor
    kv_lens: Tensor  # the new token included: also the index of the token about to be sampled

    def first(self, n: int) -> "DecodeInputs":
        """Those of the first n."""
        return DecodeInputs(self.ids[:n], self.positions[:n], self.slots[:n], self.kv_lens[:n])


@dataclass(frozen=True, slots=True)
class HeadTransform:
    """What happens to q and k heads before attention, as in `ops.qk_norm_rope_store`.

    q_weight, k_weight  [d] bf16: RMS norm of each head; both or neither
    cos_sin             [max_positions, d] float32
    """

    q_weight: Tensor | None
    k_weight: Tensor | None
    eps: float
    cos_sin: Tensor


def decode_inputs(max_sequences: int, device: torch.device) -> DecodeInputs:
    """Room for `max_sequences`."""
    return DecodeInputs(
        *torch.empty((4, max_sequences), dtype=torch.int32, device=device).unbind(0)
    )


class DecodeAttention:
    """Attention of one query per sequence, for models of one shape. Owned by the engine thread.

    Holds the plan and the workspace, which one stream at a time may use.
    """

    def __init__(
        self,
        q_heads: int,
        kv_heads: int,
        head_dim: int,
        page_size: int,
        max_sequences: int,
        device: torch.device,
        tuning: DecodeTuning,
        window: int | None = None,
    ) -> None:
        group = q_heads // kv_heads
        _check_shape(q_heads, kv_heads, head_dim, page_size, tuning)
        self.kv_heads, self.head_dim, self.group = kv_heads, head_dim, group
        self.page_size, self._window = page_size, window or 0
        self._tuning, self._groups = tuning, kv_heads // tuning.heads_per_block
        resident = multiprocessors(device) * tuning.blocks_per_multiprocessor
        self._spans = max(1, resident // self._groups)  # one per block and group of heads

        def ints(count: int) -> Tensor:
            return torch.zeros(count, dtype=torch.int32, device=device)

        pairs, slots = (group + 1) // 2, 2 * self._spans * kv_heads
        self._plan_sequences = ints(max_sequences * _SEQUENCE_WORDS)
        self._plan_spans = ints(self._spans * _SPAN_WORDS)
        self._arrived = ints(max_sequences * kv_heads)
        self._parts = torch.empty(slots * pairs * 2 * head_dim, device=device)
        self._sums = torch.empty(slots * pairs * 4, device=device)
        self._max_sequences = max_sequences
        self._just_written = False  # what attention reads before it waits: the plan, or keys
        self._planned_rows = False  # the plan knows the sequences' rows

    def _plan_arguments(self) -> tuple[int, ...]:
        plan = self._plan_sequences.data_ptr(), self._plan_spans.data_ptr()
        return self._window, *plan, self._spans, self._tuning.min_tiles

    def _plan_shared_bytes(self, sequences: int) -> int:
        if sequences > self._max_sequences:
            raise ValueError(f"{sequences} sequences, but room for {self._max_sequences}")
        return 4 * (sequences + 1 + self._spans + 1)

    def plan(self, kv_lens: Tensor) -> None:
        """Shares out sequences of kv_lens [n] int32 keys; `attend` follows until the next plan."""
        n = len(kv_lens)
        _plan_kernels("plan_decode", "PiiPPii").launch(
            (1, 1), _plan_threads(n), kv_lens.data_ptr(), n, *self._plan_arguments(),
            shared_bytes=self._plan_shared_bytes(n),
        )  # fmt: skip
        self._just_written, self._planned_rows = True, False

    def prepare(self, rows: Tensor, state: StepState, inputs: DecodeInputs) -> None:
        """Starts a decode step of rows [n] int32, as the step descriptor says, and plans it.

        A row's last token goes to position lengths[row], which grows by one. The dummy row pads a
        bucket: position 0 of page 0, and its length stays. Two kernels at least come between this
        and what reads `inputs` or the plan before its wait: `qk_norm_rope_store`, `attend`.
        """
        n = len(rows)
        _plan_kernels("prepare_decode", "PiiPPPiiPPPPiPPii").launch(
            (1, 1), _plan_threads(n),
            rows.data_ptr(), n, len(state.lengths) - 1, state.last_token.data_ptr(),
            state.lengths.data_ptr(), state.page_table.data_ptr(), state.page_table.shape[1],
            self.page_size.bit_length() - 1, inputs.ids.data_ptr(), inputs.positions.data_ptr(),
            inputs.slots.data_ptr(), inputs.kv_lens.data_ptr(), *self._plan_arguments(),
            shared_bytes=self._plan_shared_bytes(n),
        )  # fmt: skip
        self._just_written, self._planned_rows = False, True

    def attend(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        kv_lens: Tensor,
        page_table: Tensor,
        scale: float,
        rows: Tensor | None = None,
        out: Tensor | None = None,
        keys_are_new: bool = False,
    ) -> Tensor:
        """[n, hq, d], `out` where given: each sequence's query over its keys, by the last plan.

        q           [n, hq, d] bf16, contiguous; a sequence of no keys gives zeros
        kv_lens     [n] int32, those of the plan: not read again
        page_table  [n, max_pages] int32, or with `rows` [n] int32 indexed by rows[i]; after
                    `prepare` those of its rows and state

        All but each sequence's last key and q was written two or more kernels ago; with
        `keys_are_new`, just now.
        """
        out = torch.empty_like(q) if out is None else out
        self._just_written |= keys_are_new
        self._launch(q, None, k_cache, v_cache, page_table, scale, rows, out)
        return out

    def attend_qkv(
        self,
        qkv: Tensor,
        head: HeadTransform,
        k_cache: Tensor,
        v_cache: Tensor,
        kv_lens: Tensor,
        page_table: Tensor,
        scale: float,
        rows: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """`qk_norm_rope_store` and `attend` in one: [n, hq, d], and the new keys and values stored.

        qkv  [n, (hq + 2 hkv) * d] bf16, contiguous

        A sequence's newest token is at position kv_len - 1; at least one key each. The rest is as
        in `attend`.
        """
        if out is None:
            shape = (len(qkv), self.group * self.kv_heads, self.head_dim)
            out = torch.empty(shape, dtype=qkv.dtype, device=qkv.device)
        self._launch(qkv, head, k_cache, v_cache, page_table, scale, rows, out)
        return out

    def _launch(
        self,
        q: Tensor,
        head: HeadTransform | None,
        k_cache: Tensor,
        v_cache: Tensor,
        page_table: Tensor,
        scale: float,
        rows: Tensor | None,
        out: Tensor,
    ) -> None:
        if q.dtype != torch.bfloat16:
            raise TypeError(f"decode attention takes bfloat16, not {q.dtype}")
        fused = 0 if head is None else 1 if head.q_weight is None else 2
        heads = self._tuning.heads_per_block
        stages, shared_bytes = ring_of(self._tuning, self.group, self.head_dim)
        run = _attention(heads, self.group, self.head_dim, stages, fused, shared_bytes)
        run.launch(
            (self._spans, self._groups), (heads + _STREAMERS) * 32,
            q.data_ptr(), *_head_pointers(head), k_cache.data_ptr(), v_cache.data_ptr(),
            out.data_ptr(), page_table.data_ptr(),
            0 if self._planned_rows or rows is None else rows.data_ptr(),
            self._plan_sequences.data_ptr(), self._plan_spans.data_ptr(), self._parts.data_ptr(),
            self._sums.data_ptr(), self._arrived.data_ptr(), self.kv_heads, page_table.shape[1],
            self.page_size.bit_length() - 1, self._window, scale,
            0.0 if head is None else head.eps,
            shared_bytes=shared_bytes, overlap=not self._just_written,
        )  # fmt: skip
        self._just_written = False


def _head_pointers(head: HeadTransform | None) -> tuple[int, int, int]:
    if head is None:
        return 0, 0, 0
    if head.q_weight is None or head.k_weight is None:
        return 0, 0, head.cos_sin.data_ptr()
    return head.q_weight.data_ptr(), head.k_weight.data_ptr(), head.cos_sin.data_ptr()


def ring_of(tuning: DecodeTuning, group: int, head_dim: int) -> tuple[int, int]:
    """(stages, shared bytes) of a block's ring of tiles: as many as fit, within reason."""
    row = tuning.heads_per_block * head_dim * 2
    stage = 2 * TILE * (row + 16) + row * group + head_dim * 4 + _RING_BYTES_PER_STAGE
    budget = min(tuning.ring_bytes, _SHARED_BYTES) // tuning.blocks_per_multiprocessor
    if tuning.blocks_per_multiprocessor > 1:
        budget -= 1024  # the system's own, per block
    stages = min(_MAX_STAGES, budget // stage)
    if stages < 2:
        raise ValueError(f"{tuning} leaves room for {stages} tiles of {stage} bytes: two at least")
    return stages, stages * stage


def _check_shape(
    q_heads: int, kv_heads: int, head_dim: int, page_size: int, tuning: DecodeTuning
) -> None:
    group = q_heads // kv_heads
    if q_heads % kv_heads or group > 8:
        raise ValueError(f"{q_heads} query heads over {kv_heads} key-value heads: at most 8 to 1")
    if head_dim not in (64, 128):
        raise ValueError(f"head_dim is {head_dim}: decode attention takes 64 and 128")
    if page_size < TILE or page_size & (page_size - 1):
        raise ValueError(f"page size {page_size} is not a power of two from {TILE} on")
    if kv_heads % tuning.heads_per_block:
        raise ValueError(f"{tuning.heads_per_block} heads a block do not divide {kv_heads}")


def _plan_threads(sequences: int) -> int:
    return min(1024, max(128, -(-sequences // 32) * 32))


@functools.cache
def _attention(
    heads: int, group: int, head_dim: int, stages: int, fused: int, shared_bytes: int
) -> Kernel:
    macros = {
        "HEADS": heads,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "STAGES": stages,
        "FUSED": fused,
    }
    run = kernel("decode_attention.cu", "decode_attention", "P" * 14 + "iiiiff", macros)
    return run.allow_shared(shared_bytes)


@functools.cache
def _plan_kernels(name: str, parameters: str) -> Kernel:
    return kernel("prepare.cu", name, parameters, {})
