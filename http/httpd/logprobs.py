"""Log-probabilities on the wire: a chat's list of tokens, and the four lists of a completion."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from engine.request import PromptText, TokenScore, TokenText
from httpd.text import well_formed

LEAST = -9999.0  # for a token that cannot come, as at OpenAI: JSON has no infinity


def chat_logprobs(scores: Iterable[TokenScore]) -> dict[str, Any]:
    """The `logprobs` of a chat choice."""
    content = [
        {**_token(score.token), "top_logprobs": [_token(one) for one in score.top]}
        for score in scores
    ]
    return {"content": content, "refusal": None}


def _token(token: TokenText) -> dict[str, Any]:
    return {
        "token": well_formed(token.text),
        "logprob": _finite(token.logprob),
        "bytes": list(token.utf8),
    }


class CompletionLogprobs:
    """The `logprobs` of a completion choice, piece by piece. Owned by the HTTP loop."""

    def __init__(self) -> None:
        self._offset = 0  # characters told so far

    def prompt(self, prompt: PromptText) -> dict[str, Any]:
        """Of an echoed prompt: nothing precedes its first token, which has null."""
        return self.piece(prompt.scores, first=prompt.first)

    def piece(self, scores: Sequence[TokenScore], first: TokenText | None = None) -> dict[str, Any]:
        """Of the next tokens, `first` before them."""
        tokens = [score.token for score in scores]
        told: dict[str, Any] = {
            "tokens": [well_formed(token.text) for token in tokens],
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            "top_logprobs": [_alternatives(score) for score in scores],
            "text_offset": [],
        }
        if first is not None:
            told["tokens"].insert(0, well_formed(first.text))
            told["token_logprobs"].insert(0, None)
            told["top_logprobs"].insert(0, None)
        for text in told["tokens"]:
            told["text_offset"].append(self._offset)
            self._offset += len(text)
        return told


def joined(pieces: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Several pieces as one."""
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return {name: [each for piece in pieces for each in piece[name]] for name in names}


def _alternatives(score: TokenScore) -> dict[str, float] | None:
    """The likeliest tokens and the token itself, by text; of two with one text the likelier."""
    if not score.top:
        return None
    told: dict[str, float] = {}
    for one in (*score.top, score.token):
        told.setdefault(well_formed(one.text), _finite(one.logprob))
    return told


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) and logprob > LEAST else LEAST
