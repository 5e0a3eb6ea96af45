"""One vocabulary and one compiler for all tests of grammars: each is a process to start."""

from collections.abc import Iterator

import pytest

from engine.grammar.compiler import GrammarCompiler
from engine.grammar.vocabulary import Vocabulary
from tests.fakes_vocabularies import small_vocabulary


@pytest.fixture(scope="session")
def vocabulary() -> Vocabulary:
    return small_vocabulary()


@pytest.fixture(scope="session")
def compiler(vocabulary: Vocabulary) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(vocabulary)
    yield compiler
    compiler.close()
