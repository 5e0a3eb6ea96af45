"""A tokenizer's vocabulary as the grammar library knows it: the bytes of each id.

Knows byte-level BPE and SentencePiece's byte fallback, which is what the library reads from a
tokenizer.json. Special tokens have no bytes there: no text rule allows them, only a grammar that
names them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

import tokenizers

from engine.errors import ModelError
from engine.grammar.escapes import EscapeGuard
from engine.grammar.native import llguidance

_WORD_BITS: Final = 32


class Vocabulary:
    """Token ids and their bytes. Safe from any thread: nothing is written after construction.

    width       ids are below it: the width of the model's logits
    mask_words  32-bit words of a mask; word i holds ids 32i … 32i+31, the lowest bit first
    eos_ids     allowed where a grammar is complete; at least one
    """

    def __init__(self, backend: tokenizers.Tokenizer, width: int, eos_ids: Sequence[int]) -> None:
        """Takes a second for 150,000 tokens. Raises ModelError where the library cannot read it."""
        self.width = width
        self.mask_words = -(-width // _WORD_BITS)
        known = min(width, max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1)
        self.eos_ids = tuple(sorted({each for each in eos_ids if 0 <= each < known}))
        if not self.eos_ids:
            raise ModelError(f"none of the EOS ids {list(eos_ids)} is in the tokenizer")
        self.text = _below(backend, width)
        self.library = load(self.text, width, self.eos_ids)
        self.escapes = EscapeGuard(
            [self.library.decode_bytes([each]) for each in range(known)], self.mask_words
        )
        added = backend.get_added_tokens_decoder()
        self._special = {added[each].content for each in added if added[each].special}

    def is_special(self, text: str) -> bool:
        """Whether `text` is a special token: a grammar names it, since no text becomes one."""
        return text in self._special


def load(text: str, width: int, eos_ids: Sequence[int]) -> llguidance.LLTokenizer:
    """The library's tokenizer, here and in the trial process. Raises ModelError."""
    if llguidance is None:
        raise ModelError("llguidance is not installed, so there is no constrained output")
    try:
        return llguidance.LLTokenizer(text, n_vocab=width, eos_token=list(eos_ids))
    except ValueError as error:
        raise ModelError(f"the tokenizer does not suit constrained output: {error}") from error


def _below(backend: tokenizers.Tokenizer, width: int) -> str:
    """tokenizer.json without the ids that the model has no logits for; a few checkpoints have."""
    text: str = backend.to_str()
    if max(backend.get_vocab(with_added_tokens=True).values(), default=0) < width:
        return text
    document: dict[str, Any] = json.loads(text)
    document["added_tokens"] = [each for each in document["added_tokens"] if each["id"] < width]
    model = document["model"]
    if isinstance(model["vocab"], list):  # Unigram: a token's id is its place
        model["vocab"] = model["vocab"][:width]
    else:
        kept = {token: each for token, each in model["vocab"].items() if each < width}
        model["vocab"] = kept
        model["merges"] = [pair for pair in model.get("merges", ()) if _merged(pair) in kept]
    return json.dumps(document)


def _merged(pair: str | list[str]) -> str:
    return "".join(pair.split(" ", 1) if isinstance(pair, str) else pair)
