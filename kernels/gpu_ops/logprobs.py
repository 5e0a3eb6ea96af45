"""Log-probabilities of ids under the model itself: before rules, temperature and filters."""

from typing import NamedTuple

import torch

Tensor = torch.Tensor


class TokenLogprobs(NamedTuple):
    """Of n drawn or given ids."""

    chosen: Tensor  # [n] float32
    ranks: Tensor  # [n] int32; 1 for the likeliest
    top_ids: Tensor  # [n, k] int32, the likeliest first
    top: Tensor  # [n, k] float32


def logprobs_of(logits: Tensor, token_ids: Tensor, k: int) -> TokenLogprobs:
    """The ids' log-probabilities, and the k likeliest ids'.

    logits     [n, v]
    token_ids  [n] int32
    Launches on the current stream; does not synchronise.
    """
    token_ids = token_ids.to(logits.device)
    logprobs = logits.float().log_softmax(-1)
    chosen = logprobs.gather(-1, token_ids.long()[:, None])
    ranks = (logprobs > chosen).sum(-1, dtype=torch.int32) + 1
    top, top_ids = logprobs.topk(min(k, logits.shape[-1]))
    return TokenLogprobs(chosen[:, 0], ranks, top_ids.to(torch.int32), top)
