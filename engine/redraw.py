"""Draws again for the few rows whose logits have rules, after a step drew for all rows alike.

The graphs and kernels of a step know nothing of rules, and rows without them pay nothing. Launches
on the current stream, eagerly; does not synchronise.
"""

from collections.abc import Sequence

import numpy as np
import torch

from engine.descriptor import StepDescriptor
from engine.forward import Parts, SegmentIndex
from engine.request import Int32Array
from engine.scoring import SampledScores
from engine.special_rows import SpecialRows
from gpu_ops.logprobs import TokenLogprobs

Tensor = torch.Tensor


class Redraw:
    """Rules and scores of a CUDA device's rows. Owned by the engine thread."""

    def __init__(self, parts: Parts, rows: int) -> None:
        self._parts = parts
        self._special = SpecialRows(parts.model, rows)

    def apply(self, step: StepDescriptor) -> None:
        """Takes what the descriptor says of its rows."""
        self._special.apply(step)

    @property
    def is_needed(self) -> bool:
        """Whether `run` may have anything to do."""
        return self._special.has_any

    def run(
        self,
        step: StepDescriptor,
        rows: Int32Array,
        hidden: Tensor,
        positions: Tensor,
        ids: Tensor,
        first: int,
    ) -> tuple[SampledScores, ...]:
        """Writes the ids of rows with rules, and their last tokens; returns the scores wanted.

        hidden     [>= n, hidden] of the n rows, in their order
        positions  [n] int32, of the sampled tokens
        ids        [n] int32
        first      index of the first of them among the step's sampled tokens
        """
        if not self._special.has_any:
            return ()
        special = np.nonzero(self._special.concerns(rows))[0]
        if not special.size:
            return ()
        rows, at = rows[special], torch.from_numpy(special).to(ids.device)
        logits = self._parts.model.logits(hidden.index_select(0, at))
        ruled = np.nonzero(self._special.ruled(rows))[0]
        if ruled.size:
            among = torch.from_numpy(ruled).to(ids.device)
            where = at[among]
            drawn = self._draw(step, rows[ruled], logits[among], positions[where])
            ids[where] = drawn
        scores = self._special.sampled_scores(logits, ids[at], rows)
        return tuple(
            SampledScores((first + special[one.indices]).astype(np.int32), one.scores)
            for one in scores
        )

    def run_prefill(
        self,
        step: StepDescriptor,
        index: SegmentIndex,
        staged: Sequence[Tensor],
        hidden: Tensor,
        ids: Tensor,
    ) -> tuple[tuple[SampledScores, ...], tuple[tuple[int, TokenLogprobs], ...]]:
        """As `run`, for the segments that sample; and the scores of prompt tokens.

        staged, hidden, ids  as `PrefillRunner.run` takes and gives them
        """
        *_, sampled, _, positions = staged
        prompts = self._special.prompt_scores(step, hidden)
        if not len(ids):
            return (), prompts
        return self.run(step, index.rows, hidden[sampled], positions, ids, first=0), prompts

    def _draw(
        self, step: StepDescriptor, rows: Int32Array, logits: Tensor, positions: Tensor
    ) -> Tensor:
        """[n] int32, also stored as the rows' last tokens."""
        parts, state = self._parts, self._parts.rows
        adjusted = self._special.adjusted(logits, step, rows, positions)
        ids = torch.empty(len(rows), dtype=torch.int32, device=logits.device)
        on_device = torch.from_numpy(rows).to(logits.device)
        parts.sampler.sample_into(
            ids, adjusted, state.sampling, positions, on_device, state.step.last_token
        )
        self._special.count(rows, ids)
        return ids
