"""Log-probabilities on the wire: a chat's list of tokens, the four lists of a completion, and a
prompt's in vLLM's form.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from engine.request import PromptText, TokenScore, TokenText
from httpd.text import well_formed

LEAST = -9999.0  # for a token that cannot come, as at OpenAI: JSON has no infinity


def chat_logprobs(scores: Iterable[TokenScore]) -> dict[str, Any]:
    """The `logprobs` of a chat choice."""
    return {"content": token_logprobs(scores), "refusal": None}


def token_logprobs(scores: Iterable[TokenScore]) -> list[dict[str, Any]]:
    """Each token with the likeliest at its place: of a chat, and of a response's text."""
    return [
        {**_token(score.token), "top_logprobs": [_token(one) for one in score.top]}
        for score in scores
    ]


def prompt_logprobs(prompt: PromptText, top: int) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: of each token the `top` likeliest and itself, by id.

    Nothing precedes the first, which has null.
    """
    return [None, *(_by_id(score, top) for score in prompt.scores)]


def _by_id(score: TokenScore, top: int) -> dict[str, Any]:
    ranked = [*enumerate(score.top[:top], 1), (score.rank, score.token)]
    return {
        str(one.token_id): {
            "logprob": _finite(one.logprob),
            "rank": rank,
            "decoded_token": well_formed(one.text),
        }
        for rank, one in ranked
    }


def _token(token: TokenText) -> dict[str, Any]:
    return {
        "token": well_formed(token.text),
        "logprob": _finite(token.logprob),
        "bytes": list(token.utf8),
    }


class CompletionLogprobs:
    """The `logprobs` of a completion choice, piece by piece. Owned by its HTTP loop."""

    def __init__(self, top: int) -> None:
        """top  the likeliest tokens told at each place"""
        self._top = top
        self._offset = 0  # characters told so far

    def prompt(self, prompt: PromptText) -> dict[str, Any]:
        """Of an echoed prompt: nothing precedes its first token, which has null."""
        return self.piece(prompt.scores, first=prompt.first)

    def piece(self, scores: Sequence[TokenScore], first: TokenText | None = None) -> dict[str, Any]:
        """Of the next tokens, `first` before them."""
        tokens = [score.token for score in scores]
        told: dict[str, Any] = {
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            "top_logprobs": [_alternatives(score, self._top) for score in scores],
        }
        if first is not None:
            tokens.insert(0, first)
            told["token_logprobs"].insert(0, None)
            told["top_logprobs"].insert(0, None)
        told["tokens"] = [_text(token) for token in tokens]
        told["text_offset"] = [self._place(token) for token in tokens]
        return told

    def _place(self, token: TokenText) -> int:
        """Where the token's text begins: with the character that its first byte is part of."""
        begun = sum(byte & 0xC0 != 0x80 for byte in token.utf8)  # characters: RFC 3629, 3
        goes_on = bool(token.utf8) and token.utf8[0] & 0xC0 == 0x80 and self._offset > 0
        place = self._offset - goes_on
        self._offset += begun
        return place


def joined(pieces: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Several pieces as one."""
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return {name: [each for piece in pieces for each in piece[name]] for name in names}


def _alternatives(score: TokenScore, top: int) -> dict[str, float] | None:
    """The likeliest tokens and the token itself, by text; of two with one text the likelier."""
    if not top:
        return None
    told: dict[str, float] = {}
    for one in (*score.top[:top], score.token):
        told.setdefault(_text(one), _finite(one.logprob))
    return told


def _text(token: TokenText) -> str:
    """The token's text; of one that is part of a character its bytes, as OpenAI writes them."""
    try:
        token.utf8.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.utf8)
    return well_formed(token.text)


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) and logprob > LEAST else LEAST
