"""Log-probabilities of sampled and of prompt tokens, worked out on the device of the logits.

Only steps with rows that ask for them come here. Launches on the current stream; `to_host_sync`
alone synchronises.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from engine.descriptor import StepDescriptor, output_logprobs, prompt_logprobs
from engine.logprobs import StepLogprobs
from engine.models.decoder import Decoder
from engine.request import Int32Array, Logprobs
from gpu_ops.logprobs import TokenLogprobs, logprobs_of

Tensor = torch.Tensor

# Positions whose logits exist at a time: 64 of a vocabulary of 150,000 are 40 MB in float32.
SCORED_AT_ONCE: Final = 64


@dataclass(frozen=True, slots=True)
class SampledScores:
    """Of some of the step's sampled tokens. On the device."""

    indices: Int32Array  # [n] which of them; on the host
    scores: TokenLogprobs  # of n tokens


@dataclass(frozen=True, slots=True)
class StepScores:
    """What a step worked out, on the device until somebody asks. Owned by the engine thread."""

    sampled: tuple[SampledScores, ...]
    prompts: tuple[tuple[int, TokenLogprobs], ...]  # (row, of its next tokens)

    def to_host_sync(self) -> StepLogprobs | None:
        """Blocks until done; None where there is nothing."""
        if not self.sampled and not self.prompts:
            return None
        prompts = tuple((row, _to_host(scores)) for row, scores in self.prompts)
        if not self.sampled:
            return StepLogprobs(np.empty(0, np.int32), None, prompts)
        k = max(part.scores.top.shape[1] for part in self.sampled)
        sampled = Logprobs.joined([_widened(_to_host(part.scores), k) for part in self.sampled])
        return StepLogprobs(
            np.concatenate([part.indices for part in self.sampled]), sampled, prompts
        )


def score_sampled(
    logits: Tensor, token_ids: Tensor, words: Int32Array
) -> tuple[SampledScores, ...]:
    """The scores of those tokens that want one; empty where none does.

    logits     [n, v], as the model made them
    token_ids  [n] int32
    words      [n] int32 as `descriptor.logprob_word`, each token's row's
    """
    wanted = output_logprobs(words)
    indices = np.nonzero(wanted >= 0)[0]
    if not indices.size:
        return ()
    at = torch.from_numpy(indices).to(logits.device)
    scores = logprobs_of(logits[at], token_ids[at], int(wanted.max()))
    return (SampledScores(indices.astype(np.int32), scores),)


class PromptScorer:
    """Scores prompts chunk by chunk. Owned by the engine thread.

    A token's score comes from the position before it, which may be in the chunk before: its hidden
    state is kept until then.
    """

    def __init__(self, model: Decoder) -> None:
        self._model = model
        self._last: dict[int, Tensor] = {}  # row → [1, hidden] of its last chunk's last position

    def score(
        self, step: StepDescriptor, hidden: Tensor, words: Int32Array
    ) -> tuple[tuple[int, TokenLogprobs], ...]:
        """(row, of its next tokens) for each segment whose row wants it.

        hidden  [tokens, hidden] the step's, prefill segments first
        words   [rows] int32 as `descriptor.logprob_word`
        """
        scores = []
        wanted = prompt_logprobs(words[step.segments[:, 0]]).tolist()
        ends = np.cumsum(step.segments[:, 2]).tolist()
        for (row, start, count, samples), end, k in zip(
            step.segments.tolist(), ends, wanted, strict=True
        ):
            if k < 0:
                continue
            states, ids = hidden[end - count : end], step.prefill_tokens[end - count : end]
            last = self._last.pop(row, None)
            if start and last is not None:
                states = torch.cat([last, states])
            else:
                ids = ids[1:]  # nothing precedes a prompt's first token
            if not samples:
                self._last[row] = states[-1:].clone()
            if len(ids):
                scores.append((row, self._score(states[:-1], torch.from_numpy(ids.copy()), k)))
        return tuple(scores)

    def _score(self, states: Tensor, ids: Tensor, k: int) -> TokenLogprobs:
        parts = []
        for begin in range(0, len(ids), SCORED_AT_ONCE):
            part = slice(begin, begin + SCORED_AT_ONCE)
            parts.append(logprobs_of(self._model.logits(states[part]), ids[part], k))
        return TokenLogprobs(*map(torch.cat, zip(*parts, strict=True)))


def _to_host(scores: TokenLogprobs) -> Logprobs:
    return Logprobs(*(column.cpu().numpy() for column in scores))


def _widened(logprobs: Logprobs, k: int) -> Logprobs:
    """With k columns: those that it lacks are never looked at."""
    missing = ((0, 0), (0, k - logprobs.top.shape[1]))
    top_ids, top = np.pad(logprobs.top_ids, missing), np.pad(logprobs.top, missing)
    return Logprobs(logprobs.chosen, logprobs.ranks, top_ids, top)
