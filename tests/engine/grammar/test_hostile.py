"""Grammars made to hurt: each ends within its limits, with an answer, and the process lives on.

CVE-2025-29770, CVE-2025-32381 (caches without a bound: test_compiler.py), CVE-2025-57809
(recursion), CVE-2025-58446 (enums), CVE-2026-25048 (depth), CVE-2026-55574 and PYSEC-2026-3933
(regexes).
"""

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from engine.grammar.compiler import GrammarCompiler
from engine.grammar.spec import Grammar, GrammarError, GrammarLimits, GrammarSpec, JsonSchema, Regex
from engine.grammar.vocabulary import Vocabulary
from tests.fakes_vocabularies import allowed, drawn

LIMITS = GrammarLimits(trial_cpu_s=0.5, trial_bytes=200_000_000)
# Besides a trial: a fork, and the same compilation here. Other processes may have the cores.
PATIENCE_S = 20.0


def schema(value: Any) -> JsonSchema:
    return JsonSchema(json.dumps(value))


def chain(length: int, link: str, last: str) -> str:
    rules = "\n".join(link.format(this=i, next=i + 1) for i in range(length))
    return f"start: R0\n{rules}\nR{length}: {last}"


def references(length: int) -> JsonSchema:
    links = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(length)}
    return schema({"$defs": links | {f"d{length}": {"type": "null"}}, "$ref": "#/$defs/d0"})


CROSS = [
    {"anyOf": [{"type": "object", "required": [f"k{i}_{j}"]} for j in range(6)]} for i in range(10)
]
# Refused, whatever the reason is.
REFUSED: dict[str, GrammarSpec] = {
    "a billion items": schema({"type": "array", "items": {}, "minItems": 10**9}),
    "up to a billion items": schema({"type": "array", "items": {}, "maxItems": 10**9}),
    "deep schema": JsonSchema('{"items":' * 50_000 + "{}" + "}" * 50_000),
    "long chain of references": references(5000),
    "reference to itself": schema({"allOf": [{"$ref": "#"}, {"type": "object"}]}),
    "product of alternatives": schema({"allOf": CROSS}),
    "huge multiples": schema({"type": "integer", "multipleOf": 1_000_003}),
    "many multiples": schema({"allOf": [{"multipleOf": each} for each in (997, 991, 983)]}),
    "many optional letters": Regex("a?" * 20_000 + "a" * 20_000),
    "repeats of repeats": Regex("((a{1000}){1000}){1000}"),
    "a billion repeats": Regex("a{1000000000}"),
    "deep groups": Regex("(" * 50_000 + "a" + ")" * 50_000),
    "deep stars": Regex("(" * 300 + "a" + ")*" * 300),
    "rules that double": Grammar(chain(60, "R{this}: R{next} R{next}", '"a"')),
    "long chain of rules": Grammar(chain(9000, 'R{this}: R{next} "b"', '"a"')),
    "a rule that is itself": Grammar("start: start"),
    "deep parentheses": Grammar("start: " + "(" * 50_000 + '"a"' + ")" * 50_000),
    "deep GBNF": Grammar("root ::= " + "(" * 50_000 + '"a"' + ")" * 50_000),
    "a terminal that recurs": Grammar('start: A\nA: A "a" | "b"'),
}
# Accepted: the library keeps the work of each mask small.
HARMLESS: dict[str, GrammarSpec] = {
    "nested quantifiers": Regex("(a+)+b"),
    "exponential automaton": Regex("(a|b)*a(a|b){60}"),
    "repeats of options": Regex("(((a{0,30}b){0,30}c){0,30}d){0,30}"),
    "long texts": schema({"type": "string", "minLength": 1_000_000}),
    "thousands of items": schema({"type": "array", "items": {"type": "null"}, "maxItems": 3000}),
    "left recursion": Grammar('start: start "a" | "a"'),
    "ambiguity": Grammar('start: start start start | start start | "a" | "b"'),
    "empty rules": Grammar('start: a*\na: b*\nb: ""'),
    "a million repeats": Grammar('start: a{1000000}\na: "x" | "y"'),
}


@pytest.fixture(scope="module")
def strict_compiler(vocabulary: Vocabulary) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(vocabulary, LIMITS)
    compiler.compile(Regex("a"))  # the process is up
    yield compiler
    compiler.close()


@pytest.mark.parametrize("name", REFUSED)
def test_a_hostile_grammar_is_refused_in_time(name: str, strict_compiler: GrammarCompiler) -> None:
    began = time.monotonic()
    with pytest.raises(GrammarError) as refusal:
        strict_compiler.compile(REFUSED[name])
    assert time.monotonic() - began < PATIENCE_S
    assert not refusal.value.transient and len(refusal.value.message) < 500
    assert strict_compiler.compile(Regex("a")), "the next grammar is compiled as ever"


@pytest.mark.parametrize("name", HARMLESS)
def test_what_looks_hostile_may_be_harmless(
    name: str, strict_compiler: GrammarCompiler, vocabulary: Vocabulary
) -> None:
    began = time.monotonic()
    grammar = strict_compiler.compile(HARMLESS[name])
    drawn(grammar.matcher(), vocabulary, 3, (), limit=40)
    assert time.monotonic() - began < PATIENCE_S


def test_others_compile_and_match_while_a_grammar_is_tried(
    strict_compiler: GrammarCompiler, vocabulary: Vocabulary
) -> None:
    """Nothing waits for a trial but other grammars that are new."""
    known = strict_compiler.compile(Regex("a+"))
    refused: list[str] = []

    def hurt() -> None:
        try:
            strict_compiler.compile(Regex("b?" * 20_000 + "b" * 20_000))
        except GrammarError as error:
            refused.append(error.message)

    hurting = threading.Thread(target=hurt)
    hurting.start()
    masks = 0
    while hurting.is_alive():
        assert strict_compiler.compile(Regex("a+")) is known
        assert allowed(known.matcher(), vocabulary)
        masks += 1
    hurting.join()
    assert refused and masks > 20
