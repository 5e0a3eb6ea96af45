"""Log-probabilities of sampled and of prompt tokens, worked out on the device of the logits.

Only steps with rows that ask for them come here. Launches on the current stream; `to_host` alone
synchronises.
"""

from typing import Final

import numpy as np
import torch

from engine.descriptor import StepDescriptor
from engine.models.decoder import Decoder
from engine.request import Int32Array, Logprobs
from gpu_ops.logprobs import logprobs_of

Tensor = torch.Tensor

# Positions whose logits exist at a time: 64 rows of a vocabulary of 150,000 are 40 MB.
SCORED_AT_ONCE: Final = 64


def score_sampled(
    logits: Tensor, token_ids: Int32Array, words: Int32Array
) -> tuple[Int32Array, Logprobs | None]:
    """Which of the sampled tokens are scored, and their scores; None where none is.

    logits     [sampled, v], as the model made them
    token_ids  [sampled]
    words      [sampled] as `descriptor.logprob_word`, each token's row's
    """
    wanted = words & 0xFF
    indices = np.nonzero(wanted)[0].astype(np.int32)
    if not indices.size:
        return indices, None
    ids = torch.from_numpy(token_ids[indices])
    k = int(wanted.max()) - 1
    return indices, _to_host(logits[torch.from_numpy(indices).long()], ids, k)


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
    ) -> tuple[tuple[int, Logprobs], ...]:
        """(row, of its next tokens) for each segment whose row wants it.

        hidden  [tokens, hidden] the step's, prefill segments first
        words   [rows] as `descriptor.logprob_word`
        """
        scores = []
        ends = np.cumsum(step.segments[:, 2]).tolist()
        for (row, start, count, samples), end in zip(step.segments.tolist(), ends, strict=True):
            k = int(words[row] >> 8) - 1
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

    def _score(self, states: Tensor, ids: Tensor, k: int) -> Logprobs:
        parts = []
        for begin in range(0, len(ids), SCORED_AT_ONCE):
            part = slice(begin, begin + SCORED_AT_ONCE)
            parts.append(_to_host(self._model.logits(states[part]), ids[part], k))
        return Logprobs.joined(parts)


def _to_host(logits: Tensor, ids: Tensor, k: int) -> Logprobs:
    columns = logprobs_of(logits, ids.to(logits.device), k)
    return Logprobs(*(column.cpu().numpy() for column in columns))
