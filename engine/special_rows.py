"""What few rows ask for beyond a token: rules about their logits, masks and log-probabilities.

The same for every device. Rows that ask for none of it cost a look into an array.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from engine.descriptor import StepDescriptor, output_logprobs
from engine.models.decoder import Decoder
from engine.request import Int32Array
from engine.scoring import PromptScorer, SampledScores, score_sampled
from gpu_ops.logit_rules import LogitRules, forbid
from gpu_ops.logprobs import TokenLogprobs

Tensor = torch.Tensor


class SpecialRows:
    """The rules of rows, and what scores they want. Owned by the engine thread.

    Launches on the current stream; does not synchronise.
    """

    def __init__(self, model: Decoder, rows: int) -> None:
        self._rules = LogitRules(rows, model.config.vocab_size, model.device)
        self._scorer = PromptScorer(model)
        self._logprob_words = np.zeros(rows, np.int32)  # as `descriptor.logprob_word`
        self._every = np.arange(rows, dtype=np.int32)
        self.has_any = False  # whether there may be a row that `concerns`

    def apply(self, step: StepDescriptor) -> None:
        """Takes what the descriptor says of its rows."""
        joined = step.joined
        if len(joined):
            self._rules.drop(joined[:, 0])
            self._logprob_words[joined[:, 0]] = joined[:, 7]
        if len(step.rules):
            self._rules.apply(step.rules)
        if len(joined) or len(step.rules):
            self.has_any = bool(self.concerns(self._every).any())

    def concerns(self, rows: Int32Array) -> NDArray[np.bool_]:
        """[n]: which of the rows have rules, or want scores of what they draw."""
        wants_scores: NDArray[np.bool_] = output_logprobs(self._logprob_words[rows]) >= 0
        return self._rules.has(rows) | wants_scores

    def ruled(self, rows: Int32Array) -> NDArray[np.bool_]:
        """[n]: which of the rows have rules."""
        return self._rules.has(rows)

    def adjusted(
        self, logits: Tensor, step: StepDescriptor, rows: Int32Array, positions: Tensor
    ) -> Tensor:
        """[n, v] float32: the logits as the rows' rules and masks make them.

        logits     [n, v], of rows that all have rules
        positions  [n] int32, of the tokens to be drawn
        """
        adjusted = self._rules.adjust(logits, rows, positions)
        at = np.isin(step.mask_rows, rows)
        return forbid(adjusted, rows, step.mask_rows[at], step.masks[at])

    def count(self, rows: Int32Array, token_ids: Tensor) -> None:
        """The rows, which have rules, drew these ids, [n] int32."""
        self._rules.count(rows, token_ids)

    def sampled_scores(
        self, logits: Tensor, token_ids: Tensor, rows: Int32Array
    ) -> tuple[SampledScores, ...]:
        """Scores of the ids that the rows drew: see `scoring.score_sampled`."""
        return score_sampled(logits, token_ids, self._logprob_words[rows])

    def prompt_scores(
        self, step: StepDescriptor, hidden: Tensor
    ) -> tuple[tuple[int, TokenLogprobs], ...]:
        """Scores of the prompt tokens in this step: see `scoring.PromptScorer`."""
        return self._scorer.score(step, hidden, self._logprob_words)
