"""Small vocabularies, and outputs drawn from a grammar by its masks."""

import random
from collections.abc import Sequence

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine.grammar.library import allowed_ids
from engine.grammar.matcher import Matcher
from engine.grammar.vocabulary import Vocabulary

# Besides one token a byte: pieces that end or begin several lexemes at once.
PIECES = ('{"', '":', '",', '"}', '"]', "},", ":Ġ", "true", "null", "false", "12", "-1", "ab", "Ġa")
SPECIAL = ("<|end|>", "<|call|>")


def byte_level_tokenizer() -> Tokenizer:
    """An id for each byte, then PIECES, then SPECIAL."""
    texts = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *PIECES]
    tokenizer = Tokenizer(models.BPE({text: index for index, text in enumerate(texts)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def byte_fallback_tokenizer() -> Tokenizer:
    """SentencePiece's way: `<0x..>` for each byte, `▁` for a space, then letters and digits."""
    texts = ["</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefé0123456789{}[]:,-"]
    vocab = {text: index for index, text in enumerate(texts)}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return tokenizer


def small_vocabulary(width: int = 320) -> Vocabulary:
    """Of `byte_level_tokenizer`, ended by <|end|>, with ids above it that have no text."""
    backend = byte_level_tokenizer()
    return Vocabulary(backend, width, [backend.token_to_id("<|end|>")])


def empty_row(vocabulary: Vocabulary) -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
    return np.zeros(vocabulary.mask_words, np.int32)


def allowed(matcher: Matcher, vocabulary: Vocabulary) -> set[int]:
    """The ids that may come next."""
    row = empty_row(vocabulary)
    matcher.fill_mask(row)
    return set(allowed_ids(row).tolist())


def drawn(
    matcher: Matcher, vocabulary: Vocabulary, seed: int, closing: Sequence[int], limit: int = 300
) -> list[int] | None:
    """Ids drawn evenly from each mask, without the EOS; None where `limit` of them did not end.

    closing  ids preferred once a few have been drawn, so that strings and lists come to an end
    """
    chance = random.Random(seed)
    ids: list[int] = []
    while not matcher.is_terminated:
        may_follow = allowed(matcher, vocabulary)
        ends = sorted(may_follow.intersection(vocabulary.eos_ids))
        preferred = sorted(may_follow.intersection(closing))
        if ends and (len(ids) > 30 or chance.random() < 0.3):
            assert matcher.accept(ends[0])
            break
        if len(ids) == limit:
            return None
        eager = preferred and chance.random() < (0.9 if len(ids) > 40 else 0.3)
        drawn_id = chance.choice(preferred if eager else sorted(may_follow))
        assert matcher.accept(drawn_id), f"{drawn_id} is in the mask and not accepted"
        if drawn_id not in vocabulary.eos_ids:
            ids.append(drawn_id)
    assert matcher.is_complete
    return ids
