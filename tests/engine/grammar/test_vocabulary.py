"""Vocabularies: byte-level and byte-fallback tokenizers, ids that a model has no logits for."""

import pytest
from tokenizers import Tokenizer, models

from engine.errors import ModelError
from engine.grammar.compiler import GrammarCompiler
from engine.grammar.spec import GrammarLimits, Regex
from engine.grammar.vocabulary import Vocabulary
from tests.fakes_vocabularies import allowed, byte_fallback_tokenizer, byte_level_tokenizer, drawn


@pytest.mark.parametrize("width", [258, 270, 273, 1000])
def test_ids_at_or_beyond_the_width_do_not_exist(width: int) -> None:
    backend = byte_level_tokenizer()
    vocabulary = Vocabulary(backend, width, [3, 5000])
    compiler = GrammarCompiler(vocabulary, GrammarLimits(trial_tokens=1))
    try:
        mask = allowed(compiler.compile(Regex("[^x]*")).matcher(), vocabulary)
    finally:
        compiler.close()
    assert vocabulary.mask_words == -(-width // 32)
    assert vocabulary.eos_ids == (3,)
    assert max(mask) == min(width, backend.token_to_id("<|end|>")) - 1


def test_byte_fallback_spells_characters_in_bytes() -> None:
    backend = byte_fallback_tokenizer()
    vocabulary = Vocabulary(backend, backend.get_vocab_size(), [0])
    compiler = GrammarCompiler(vocabulary)
    try:
        grammar = compiler.compile(Regex("é ü[a-c]{3}"))
    finally:
        compiler.close()
    texts = set()
    for seed in range(20):
        ids = drawn(grammar.matcher(), vocabulary, seed, ())
        assert ids is not None
        texts.add(backend.decode(ids))
    assert len(texts) > 3 and all(text.startswith("é ü") and len(text) == 6 for text in texts)
    spelled = [backend.token_to_id(text) for text in ("<0xC3>", "<0xA9>", "▁", "<0xC3>", "<0xBC>")]
    matcher = grammar.matcher()
    assert all(matcher.accept(each) for each in spelled)


def test_special_tokens_are_known_by_their_text() -> None:
    vocabulary = Vocabulary(byte_level_tokenizer(), 300, [1])
    assert vocabulary.is_special("<|call|>")
    assert not vocabulary.is_special("ab") and not vocabulary.is_special("<|none|>")


def test_a_model_without_an_end_is_refused() -> None:
    with pytest.raises(ModelError, match="EOS"):
        Vocabulary(byte_level_tokenizer(), 300, [])


def test_a_tokenizer_that_the_library_does_not_know_is_refused() -> None:
    with pytest.raises(ModelError, match="tokenizer"):
        Vocabulary(Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")), 2, [1])
