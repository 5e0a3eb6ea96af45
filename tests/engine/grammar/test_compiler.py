"""The compiler: its cache, its limits, and many threads at once."""

import subprocess
import threading
from collections.abc import Iterator

import pytest

from engine.grammar.compiler import GrammarCompiler
from engine.grammar.spec import (
    Choice,
    Grammar,
    GrammarError,
    GrammarLimits,
    GrammarSpec,
    JsonSchema,
    Regex,
)
from engine.grammar.vocabulary import Vocabulary
from tests.fakes_vocabularies import allowed, drawn

LIMITS = GrammarLimits(source_bytes=1000, choices=3)


@pytest.fixture
def small_compiler(vocabulary: Vocabulary) -> Iterator[GrammarCompiler]:
    """Room for three answers."""
    compiler = GrammarCompiler(vocabulary, LIMITS, cache_entries=3)
    yield compiler
    compiler.close()


def test_what_was_compiled_is_kept(compiler: GrammarCompiler) -> None:
    first = compiler.compile(JsonSchema('{"enum": [1, 2]}'))
    assert compiler.compile(JsonSchema('{"enum": [1, 2]}')) is first
    assert compiler.compile(JsonSchema('{"enum": [2, 1]}')) is not first


def test_what_was_used_least_recently_goes_first(small_compiler: GrammarCompiler) -> None:
    a, b, c, d = (Regex(name) for name in "abcd")
    kept = small_compiler.compile(a)
    gone = small_compiler.compile(b)
    small_compiler.compile(c)
    small_compiler.compile(a)
    small_compiler.compile(d)
    assert small_compiler.compile(a) is kept
    assert small_compiler.compile(b) is not gone


def test_the_cache_is_bounded_in_bytes(vocabulary: Vocabulary) -> None:
    compiler = GrammarCompiler(vocabulary, cache_bytes=0)
    try:
        first = compiler.compile(Regex("a"))
        assert compiler.compile(Regex("a")) is not first
    finally:
        compiler.close()


def test_a_refusal_is_kept_too(small_compiler: GrammarCompiler) -> None:
    with pytest.raises(GrammarError) as first:
        small_compiler.compile(Regex("[a-"))
    small_compiler.close()  # another trial would start another process
    with pytest.raises(GrammarError) as second:
        small_compiler.compile(Regex("[a-"))
    assert second.value is not first.value and second.value.message == first.value.message


def test_a_spoiled_grammar_is_compiled_again(small_compiler: GrammarCompiler) -> None:
    first = small_compiler.compile(Regex("ab"))
    first.spoiled = True
    second = small_compiler.compile(Regex("ab"))
    assert second is not first and small_compiler.compile(Regex("ab")) is second


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (Regex("a" * 1001), "regex has 1001 bytes; the limit is 1000"),
        (Grammar("é" * 501), "grammar has 1002 bytes; the limit is 1000"),
        (JsonSchema('"' + "x" * 999 + '"'), "schema has 1001 bytes; the limit is 1000"),
        (Choice(("a", "b", "c", "d")), "choice has 4 texts; it must have 1 to 3"),
        (Choice(()), "choice has 0 texts; it must have 1 to 3"),
        (Choice(("x" * 1001,)), "choice has 1001 bytes"),
        (Regex("\ud800"), "lone surrogate at 0"),
    ],
)
def test_a_refusal_names_field_value_and_limit(
    spec: GrammarSpec, words: str, small_compiler: GrammarCompiler
) -> None:
    with pytest.raises(GrammarError) as refusal:
        small_compiler.compile(spec)
    assert words in refusal.value.message


def test_threads_compile_and_match_at_once(vocabulary: Vocabulary) -> None:
    """Some share a grammar and its automata, each thread has grammars of its own too."""
    compiler = GrammarCompiler(vocabulary)
    start = threading.Barrier(8)
    outputs: list[list[tuple[list[int] | None, ...]]] = [[] for _ in range(8)]

    def work(number: int) -> None:
        start.wait()
        for turn in range(6):
            shared = compiler.compile(JsonSchema('{"type": "array", "items": {"type": "integer"}}'))
            own = compiler.compile(Regex(f"[a-c]{{1,{number + turn + 2}}}x"))
            with pytest.raises(GrammarError):
                compiler.compile(Regex(f"({number}"))
            drawn_ids = (
                drawn(grammar.matcher(), vocabulary, turn, ()) for grammar in (shared, own)
            )
            outputs[number].append(tuple(drawn_ids))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    try:
        assert not any(thread.is_alive() for thread in threads)
        assert all(len(each) == 6 for each in outputs)
        for each in outputs[1:]:  # the shared grammar gave each thread the same
            assert [shared for shared, _ in each] == [shared for shared, _ in outputs[0]]
    finally:
        compiler.close()


def test_the_process_that_tries_grammars_is_replaced_when_it_dies(vocabulary: Vocabulary) -> None:
    compiler = GrammarCompiler(vocabulary)
    try:
        compiler.compile(Regex("a"))
        first = compiler._trial._process
        assert isinstance(first, subprocess.Popen)
        first.kill()
        first.wait()
        assert compiler.compile(Regex("b")).matcher() is not None
        second = compiler._trial._process
        assert second is not None and second.pid != first.pid
    finally:
        compiler.close()
    assert second.poll() is not None


def test_grammars_outlive_the_compiler(vocabulary: Vocabulary) -> None:
    compiler = GrammarCompiler(vocabulary)
    grammar = compiler.compile(Regex("ab"))
    compiler.close()
    assert allowed(grammar.matcher(), vocabulary)
