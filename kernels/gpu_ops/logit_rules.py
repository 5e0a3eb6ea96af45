"""What requests ask to be done to their logits before a token is drawn; torch, on any device.

Few rows have rules, and only those pay: each gets a slot in tables of [slots, vocabulary], which
grow as they are needed. Knows no requests: rules come as rows of four words.

The order, for one row
1. repetition: a logit of an id that is in the prompt or the output is divided by the penalty if
   positive, else multiplied (Keskar et al. 2019, arXiv:1909.05858).
2. frequency times how often the id is in the output, and presence once if it is, are subtracted.
3. the bias is added; ids that are not allowed have one of minus infinity.
4. before the minimal length, early ids get the logit `LAST`: they are drawn only where nothing
   else is allowed.
5. `forbid`: ids that the step's mask leaves out are at minus infinity.
"""

from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from gpu_ops.rules import Rule

Tensor = torch.Tensor
Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]

# Below every logit of a model, and finite when it is divided by the lowest temperature, 1e-5.
LAST: Final = -1e30

_IN_PROMPT: Final = 1  # bits of a mark
_EARLY: Final = 2


class LogitRules:
    """The rules of all rows that have some. Owned by the engine thread.

    Launches on the current stream; does not synchronise.
    """

    def __init__(self, rows: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size, self._device = vocab_size, device
        self._slot_of: Int64Array = np.full(rows, -1, np.int64)
        self._free: list[int] = []
        self._slots = 0
        # Of each slot, for the host: whether a table holds anything for it.
        self._has_bias, self._has_early, self._has_penalty = np.zeros((3, 0), np.bool_)
        # [slots, vocabulary] all: what is added, marks of ids, how often an id was made.
        self._bias = torch.zeros((0, vocab_size), dtype=torch.float32, device=device)
        self._marks = torch.zeros((0, vocab_size), dtype=torch.uint8, device=device)
        self._made = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        # [slots]
        self._min_length = torch.zeros(0, dtype=torch.int32, device=device)
        self._penalties = torch.zeros((0, 3), dtype=torch.float32, device=device)

    def has(self, rows: Int32Array) -> NDArray[np.bool_]:
        """[n]: whether rows[i] has rules."""
        ruled: NDArray[np.bool_] = self._slot_of[rows] >= 0
        return ruled

    def drop(self, rows: Int32Array) -> None:
        """Forgets the rows' rules: other requests have the rows now."""
        for row in rows[self.has(rows)].tolist():
            self._free.append(int(self._slot_of[row]))
            self._slot_of[row] = -1

    def apply(self, rules: Int32Array) -> None:
        """Takes new rules.

        rules  [n, 4] int32, each row's BEGIN among them
        """
        for row in rules[rules[:, 1] == Rule.BEGIN, 0].tolist():
            self._begin(row)
        for kind in Rule:
            chosen = rules[rules[:, 1] == kind]
            if kind != Rule.BEGIN and len(chosen):
                self._set(kind, self._slot_of[chosen[:, 0]], chosen[:, 2], chosen[:, 3])

    def adjust(self, logits: Tensor, rows: Int32Array, positions: Tensor) -> Tensor:
        """[n, v] float32: the rows' logits as their rules make them.

        logits     [n, v], of rows that all have rules
        positions  [n] int32, of the tokens to be drawn
        """
        slots_on_host = self._slot_of[rows]
        slots = self._to_device(slots_on_host)
        adjusted = logits.float()
        if self._has_penalty[slots_on_host].any():
            adjusted = self._penalised(adjusted, slots)
        if self._has_bias[slots_on_host].any():
            adjusted = adjusted + self._bias[slots]
        if self._has_early[slots_on_host].any():
            early = (self._marks[slots] & _EARLY) != 0
            early &= (positions < self._min_length[slots])[:, None]
            # Not where an id is forbidden for good.
            adjusted = torch.where(early, adjusted.clamp(max=LAST), adjusted)
        return adjusted

    def count(self, rows: Int32Array, token_ids: Tensor) -> None:
        """The rows, which have rules, drew these ids, [n] int32."""
        slots = self._slot_of[rows]
        counted = self._has_penalty[slots]
        if counted.any():
            at = self._to_device(np.nonzero(counted)[0])
            index = (self._to_device(slots[counted]), token_ids[at].long())
            self._made.index_put_(index, torch.ones_like(at, dtype=torch.int32), accumulate=True)

    def _penalised(self, logits: Tensor, slots: Tensor) -> Tensor:
        repetition, presence, frequency = self._penalties[slots].T[:, :, None]
        made, marks = self._made[slots], self._marks[slots]
        repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
        seen = (made > 0) | ((marks & _IN_PROMPT) != 0)
        penalised: Tensor = torch.where(seen, repeated, logits)
        penalised = penalised - frequency * made - presence * (made > 0)
        return penalised

    def _begin(self, row: int) -> None:
        slot = int(self._slot_of[row])
        if slot < 0:
            if not self._free:
                self._grow()
            slot = self._slot_of[row] = self._free.pop()
        self._has_bias[slot] = self._has_early[slot] = self._has_penalty[slot] = False
        for table in (self._bias, self._marks, self._made):
            table[slot].zero_()
        self._penalties[slot] = torch.tensor([1.0, 0.0, 0.0])

    def _grow(self) -> None:
        added = max(1, min(self._slots, len(self._slot_of) - self._slots))
        self._free = list(range(self._slots + added - 1, self._slots - 1, -1))
        self._slots += added

        def grown(table: Tensor) -> Tensor:
            return torch.cat([table, table.new_zeros((added, *table.shape[1:]))])

        self._bias, self._marks, self._made = map(grown, (self._bias, self._marks, self._made))
        self._min_length, self._penalties = grown(self._min_length), grown(self._penalties)
        flags = np.zeros(added, np.bool_)
        self._has_bias = np.concatenate([self._has_bias, flags])
        self._has_early = np.concatenate([self._has_early, flags])
        self._has_penalty = np.concatenate([self._has_penalty, flags])

    def _set(self, kind: Rule, slots: Int64Array, ids: Int32Array, values: Int32Array) -> None:
        at, to = self._to_device(slots), self._to_device(ids.astype(np.int64))
        floats = self._to_device(np.ascontiguousarray(values).view(np.float32))
        match kind:
            case Rule.ONLY_ALLOWED:
                self._bias[at] = -torch.inf
                self._has_bias[slots] = True
            case Rule.ALLOWED:
                self._bias[at, to] = 0.0
            case Rule.BIAS:
                self._bias[at, to] = floats
                self._has_bias[slots] = True
            case Rule.EARLY:
                self._marks[at, to] |= _EARLY
                self._has_early[slots] = True
            case Rule.MIN_LENGTH:
                self._min_length[at] = self._to_device(values.copy())
            case Rule.IN_PROMPT:
                self._marks[at, to] |= _IN_PROMPT
            case Rule.MADE:
                self._made[at, to] = self._to_device(values.copy())
            case _:
                self._penalties[at, kind - Rule.REPETITION] = floats
                self._has_penalty[slots] = True

    def _to_device(self, values: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(values).to(self._device, non_blocking=True)


def forbid(logits: Tensor, rows: Int32Array, mask_rows: Int32Array, masks: Int32Array) -> Tensor:
    """[n, v]: the logits, at minus infinity where a mask of the row has a 0.

    logits     [n, v] float32, written to
    rows       [n], each once
    mask_rows  [m] int32, some of `rows`
    masks      [m, ceil(v / 32)] int32; bit i % 32 of word i // 32 is 1 for an id that may be drawn
    """
    if not len(mask_rows):
        return logits
    order = np.argsort(rows)
    at = torch.from_numpy(order[np.searchsorted(rows, mask_rows, sorter=order)]).to(logits.device)
    words = torch.from_numpy(masks.copy()).to(logits.device)
    bits = torch.arange(32, dtype=torch.int32, device=words.device)
    allowed = ((words[:, :, None] >> bits) & 1).flatten(1)[:, : logits.shape[1]]
    logits[at] = logits[at].masked_fill(allowed == 0, -torch.inf)
    return logits
