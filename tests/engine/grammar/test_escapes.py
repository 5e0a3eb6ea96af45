"""The guard of JSON's escapes, against a reading of whole texts."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import MatchError
from engine.grammar.compiler import GrammarCompiler
from engine.grammar.escapes import EscapeGuard
from engine.grammar.spec import JsonSchema, Regex
from engine.grammar.vocabulary import Vocabulary
from tests.fakes_vocabularies import allowed, byte_level_tokenizer

PIECES = [
    b"\\",
    b"\\\\",
    b"\\\\\\",
    b"u",
    b"/",
    b"n",
    b"\\u",
    b"\\\\u",
    b"u\\",
    b"a\\\\/",
    b'\\"',
    b"",
]
GUARD = EscapeGuard(PIECES, 2)


@given(st.lists(st.integers(0, len(PIECES) - 1), max_size=12))
def test_a_text_is_kept_if_it_has_neither_escape(ids: list[int]) -> None:
    escaping, kept = 0, True
    for each in ids:
        kept = kept and bool(GUARD.keep[escaping, 0] >> each & 1)
        if kept:
            escaping = int(GUARD.after[escaping, each])
    text = b"".join(PIECES[each] for each in ids)
    assert kept == all(pair not in (b"\\u", b"\\/") for pair in re.findall(rb"\\.", text))


def test_ids_without_text_are_kept() -> None:
    assert np.all(GUARD.keep[:, 1] == -1)


def test_a_backslash_goes_on_with_one_of_seven_letters(
    compiler: GrammarCompiler, vocabulary: Vocabulary
) -> None:
    tokenizer = byte_level_tokenizer()
    matcher = compiler.compile(JsonSchema('{"properties": {"a": {}}}')).matcher()
    for char in '{"\\':
        assert matcher.accept(tokenizer.token_to_id(char))
    letters = {tokenizer.id_to_token(each)[0] for each in allowed(matcher, vocabulary)}
    assert letters == set('"\\bfnrt')
    assert not matcher.accept(tokenizer.token_to_id("u"))
    matcher.rollback(1)
    assert matcher.accept(tokenizer.token_to_id("u"))
    with pytest.raises(MatchError):
        matcher.rollback(10)


def test_other_grammars_may_have_any_escape(compiler: GrammarCompiler) -> None:
    tokenizer = byte_level_tokenizer()
    matcher = compiler.compile(Regex(r"\\u[0-9]")).matcher()
    assert all(matcher.accept(tokenizer.token_to_id(char)) for char in "\\u1")
