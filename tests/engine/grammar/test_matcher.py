"""Matchers: masks, tokens taken and given back, where an output may end."""

import random

import numpy as np
import pytest

from engine.errors import MatchError
from engine.grammar.compiler import GrammarCompiler
from engine.grammar.library import LibraryError, compile_text, fill
from engine.grammar.matcher import CompiledGrammar, Matcher
from engine.grammar.spec import (
    Choice,
    Grammar,
    GrammarError,
    JsonSchema,
    Regex,
    StructuralTags,
    Tag,
)
from engine.grammar.vocabulary import Vocabulary
from tests.fakes_vocabularies import allowed, byte_level_tokenizer, drawn, empty_row

TOKENIZER = byte_level_tokenizer()
EOS = TOKENIZER.token_to_id("<|end|>")
CALL = TOKENIZER.token_to_id("<|call|>")


def encode(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False).ids)


def follows(grammar: CompiledGrammar, text: str) -> bool:
    """Whether `text` is a whole output of the grammar."""
    matcher = grammar.matcher()
    return all(matcher.accept(each) for each in encode(text)) and matcher.is_complete


def test_the_end_is_allowed_where_the_grammar_is_complete_and_only_there(
    compiler: GrammarCompiler, vocabulary: Vocabulary
) -> None:
    matcher = compiler.compile(Regex("ab*")).matcher()
    assert EOS not in allowed(matcher, vocabulary)
    assert not matcher.accept(EOS) and not matcher.is_complete
    assert matcher.accept(encode("a")[0])
    assert allowed(matcher, vocabulary) == {EOS, encode("b")[0]}
    assert matcher.accept(EOS)
    assert matcher.is_terminated and matcher.is_complete
    assert not matcher.accept(EOS) and not matcher.accept(encode("b")[0])


def test_a_grammar_that_cannot_go_on_is_over_without_an_eos(compiler: GrammarCompiler) -> None:
    matcher = compiler.compile(Regex("ab")).matcher()
    assert [matcher.accept(each) for each in (encode("a")[0], encode("b")[0])] == [True, True]
    assert matcher.is_terminated and matcher.is_complete


def test_stop_ids_are_treated_like_the_end(
    compiler: GrammarCompiler, vocabulary: Vocabulary
) -> None:
    letter_a, letter_b = encode("a")[0], encode("b")[0]
    matcher = compiler.compile(Regex("[ab]{2,}")).matcher(stop_ids=[letter_b, CALL, EOS])
    assert letter_b not in allowed(matcher, vocabulary) and CALL not in allowed(matcher, vocabulary)
    assert not matcher.accept(letter_b)
    assert matcher.accept(letter_a) and matcher.accept(letter_a)
    assert {letter_a, letter_b, CALL, EOS} <= allowed(matcher, vocabulary)
    assert matcher.accept(letter_b) and matcher.is_terminated


def test_an_output_that_only_stop_ids_could_go_on_with_fails(
    compiler: GrammarCompiler, vocabulary: Vocabulary
) -> None:
    matcher = compiler.compile(Regex("a+")).matcher(stop_ids=encode("a"))
    with pytest.raises(MatchError, match="stop"):
        matcher.fill_mask(empty_row(vocabulary))


def test_a_token_that_is_not_allowed_changes_nothing(
    compiler: GrammarCompiler, vocabulary: Vocabulary
) -> None:
    matcher = compiler.compile(JsonSchema('{"enum": ["ab", "ac"]}')).matcher()
    assert matcher.accept(encode('"')[0])
    before = allowed(matcher, vocabulary)
    for wrong in (encode("x")[0], EOS, CALL, vocabulary.width - 1):
        assert not matcher.accept(wrong)
    assert allowed(matcher, vocabulary) == before


def test_the_mask_is_what_is_accepted(compiler: GrammarCompiler, vocabulary: Vocabulary) -> None:
    grammar = compiler.compile(JsonSchema('{"type": ["object", "string", "number"]}'))
    chance = random.Random(7)
    matcher = grammar.matcher()
    for _ in range(12):
        mask = allowed(matcher, vocabulary)
        for each in range(vocabulary.width):
            accepted = matcher.accept(each)
            assert accepted == (each in mask), each
            if accepted:
                matcher.rollback(1)
        going_on = sorted(mask - {EOS})
        if not going_on:
            break
        assert matcher.accept(chance.choice(going_on))


@pytest.mark.parametrize("ended", [False, True])
def test_a_rollback_undoes(compiler: GrammarCompiler, vocabulary: Vocabulary, ended: bool) -> None:
    matcher = compiler.compile(Regex("(ab)+")).matcher()
    for each in encode("a") + encode("b"):
        assert matcher.accept(each)
    before = allowed(matcher, vocabulary)
    taken = [*encode("a"), *encode("b"), EOS] if ended else encode("a")
    for each in taken:
        assert matcher.accept(each)
    matcher.rollback(len(taken))
    assert not matcher.is_terminated and allowed(matcher, vocabulary) == before
    matcher.rollback(0)
    with pytest.raises(MatchError):
        matcher.rollback(3)


def test_ids_without_text_and_special_tokens_are_never_allowed(
    compiler: GrammarCompiler, vocabulary: Vocabulary
) -> None:
    mask = allowed(compiler.compile(Regex("(.|\n)*")).matcher(), vocabulary)
    assert mask == {*range(TOKENIZER.get_vocab_size() - 2), EOS} - _not_starting_utf8()


def _not_starting_utf8() -> set[int]:
    """Byte tokens that no UTF-8 text begins with."""
    never = [*range(0x80, 0xC2), *range(0xF5, 0x100)]
    texts = {char: byte for byte, char in _byte_chars().items()}
    by_id = {TOKENIZER.token_to_id(char): byte for char, byte in texts.items()}
    return {each for each, byte in by_id.items() if byte in never}


def _byte_chars() -> dict[int, str]:
    """GPT-2's printable stand-in for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + place) for place, byte in enumerate(others)
    }


def test_a_mask_covers_the_whole_row(compiler: GrammarCompiler, vocabulary: Vocabulary) -> None:
    row = np.full(vocabulary.mask_words, -1, np.int32)
    compiler.compile(Regex("a")).matcher().fill_mask(row)
    assert np.unpackbits(row.view(np.uint8)).sum() == 1


@pytest.mark.parametrize(
    "text",
    ["yes", "a/b", 'say "x"\\', "é😀", "tab\tnew\nline", "{x}", "", "'", "\u2028\x07", "<|call|>"],
)
def test_a_choice_is_taken_literally(text: str, compiler: GrammarCompiler) -> None:
    grammar = compiler.compile(Choice(("no", text, "no", text + "x")))
    matcher = grammar.matcher()
    pieces = [TOKENIZER.encode(char, add_special_tokens=False).ids for char in text]
    assert all(matcher.accept(each) for piece in pieces for each in piece)
    assert matcher.is_complete
    assert not follows(grammar, "yes and no")


@pytest.mark.parametrize(
    ("pattern", "right", "wrong"),
    [
        ("[a-f]{2}/[0-9]+", "ab/12", "ab/"),
        ("^ab$", "ab", "xab"),
        ("(?i)ab|c", "AB", "abc"),
        (r"\d{2}\.\s", "12. ", "12."),
        ("", "", "a"),
    ],
)
def test_a_pattern_matches_as_a_whole(
    pattern: str, right: str, wrong: str, compiler: GrammarCompiler
) -> None:
    grammar = compiler.compile(Regex(pattern))
    assert follows(grammar, right) and not follows(grammar, wrong)


@pytest.mark.parametrize(
    "text",
    [
        'root ::= "(" item* ")"\nitem ::= root | [0-9]',
        'start: "(" item* ")"\nitem: start | DIGIT\nDIGIT: /[0-9]/',
    ],
    ids=["GBNF", "Lark"],
)
def test_a_grammar_may_recur(text: str, compiler: GrammarCompiler) -> None:
    grammar = compiler.compile(Grammar(text))
    assert follows(grammar, "((1)2(()))") and not follows(grammar, "((1)")


def test_a_grammar_may_name_a_special_token(
    compiler: GrammarCompiler, vocabulary: Vocabulary
) -> None:
    grammar = compiler.compile(Grammar('start: "a" <|call|> %json {"type": "boolean"}'))
    matcher = grammar.matcher()
    assert matcher.accept(encode("a")[0])
    assert allowed(matcher, vocabulary) == {CALL}
    assert matcher.accept(CALL)
    assert all(matcher.accept(each) for each in encode("true")) and matcher.is_terminated


ARGUMENTS = '{"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}'


@pytest.mark.parametrize("trigger", ["<tool>", "<|call|>"])
def test_after_a_trigger_comes_a_tag_and_before_it_anything(
    trigger: str, compiler: GrammarCompiler, vocabulary: Vocabulary
) -> None:
    tags = tuple(Tag(f"{trigger}{name}=", ARGUMENTS, "</tool>") for name in "fg")
    grammar = compiler.compile(StructuralTags(tags, (trigger,)))
    for right in (
        "no call, a < b",
        f'I call: {trigger}f={{"x": 1}}</tool> and {trigger}g={{"x":-2}}</tool>',
    ):
        assert follows(grammar, right), right
    for wrong in (f"{trigger}h", f'{trigger}f={{"y"', f'{trigger}f={{"x": 1}}</tool>{trigger}x'):
        assert not follows(grammar, wrong), wrong
    half = f'{trigger}f={{"x": 1}}'
    assert not follows(grammar, half)


def test_tags_must_start_with_a_trigger(compiler: GrammarCompiler) -> None:
    with pytest.raises(GrammarError, match="triggers"):
        compiler.compile(StructuralTags((Tag("<f>", "{}", ""),), ("<g",)))


def test_a_matcher_that_the_library_gives_up_fails_alone(vocabulary: Vocabulary) -> None:
    """Few lexer states, and a pattern that needs more of them the longer its text gets."""
    text = "start: /(a|b)*a(a|b){12}c(.|\\n)*/"
    start = compile_text(vocabulary.library, text, 1_000_000, 40)
    grammar = CompiledGrammar(start, vocabulary, 0)
    matcher = grammar.matcher()
    with pytest.raises(MatchError):
        _walk(matcher, vocabulary)
    assert grammar.spoiled
    other = CompiledGrammar(
        compile_text(vocabulary.library, "start: /ab/", 10**6, 40), vocabulary, 0
    )
    assert drawn(other.matcher(), vocabulary, 0, ()) is not None


def _walk(matcher: Matcher, vocabulary: Vocabulary) -> None:
    chance = random.Random(1)
    for _ in range(500):
        going_on = sorted(allowed(matcher, vocabulary) & set(encode("a") + encode("b")))
        matcher.accept(chance.choice(going_on))


def test_an_error_is_one_line(vocabulary: Vocabulary) -> None:
    with pytest.raises(LibraryError) as refusal:
        compile_text(vocabulary.library, "start: /" + "x" * 5000 + "[a-/", 1_000_000, 100)
    assert "\n" not in str(refusal.value) and len(str(refusal.value)) < 400
    start = compile_text(vocabulary.library, "start: /a/", 1_000_000, 100)
    with pytest.raises(ValueError):
        fill(start, np.zeros(1, np.int32))
