"""Specs to compiled grammars. Both answers are kept: a refusal costs as much to find out.

Guarantees
- A grammar is compiled here only after it has passed its trial, in another process.
- The cache is bounded in bytes, by what each grammar took in its trial, and in entries; what was
  used least recently goes first. A grammar in use lives on in its matchers.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

import numpy as np

from engine.grammar.library import LibraryError, compile_text, fill
from engine.grammar.matcher import CompiledGrammar
from engine.grammar.native import llguidance
from engine.grammar.source import library_text
from engine.grammar.spec import (
    GrammarError,
    GrammarLimits,
    GrammarSpec,
    JsonObject,
    JsonSchema,
)
from engine.grammar.trial import Trial
from engine.grammar.vocabulary import Vocabulary


class GrammarCompiler:
    """Compiles grammars for one vocabulary. Safe from any thread; `compile` may take seconds."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        limits: GrammarLimits | None = None,
        *,
        cache_bytes: int = 268_435_456,
        cache_entries: int = 1024,
    ) -> None:
        self.vocabulary = vocabulary
        self._limits = limits or GrammarLimits()
        self._trial = Trial(vocabulary, self._limits)
        self._cache = _Cache(cache_bytes, cache_entries)

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """The compiled grammar, or GrammarError with the reason."""
        known = self.try_known(spec)
        if known is not None:
            return known
        found = self._found_out(spec)
        self._cache.put(spec, found)
        return _given(found)

    def try_known(self, spec: GrammarSpec) -> CompiledGrammar | None:
        """As `compile`, where the answer is kept; None where it is not."""
        known = self._cache.get(spec)
        if known is None or (isinstance(known, CompiledGrammar) and known.spoiled):
            return None
        return _given(known)

    def close(self) -> None:
        """Ends the process that tries grammars. Compiled grammars and matchers stay usable."""
        self._trial.close()

    def _found_out(self, spec: GrammarSpec) -> CompiledGrammar | str:
        """What is kept: the grammar, or why it is refused. Raises GrammarError for a while only."""
        try:
            text = library_text(spec, self._limits, self.vocabulary.is_special)
            measured_bytes = self._trial.run(text)
            start = self._compiled(text)
        except GrammarError as error:
            if error.transient:
                raise
            return error.message
        is_json = isinstance(spec, JsonSchema | JsonObject)
        return CompiledGrammar(start, self.vocabulary, measured_bytes + len(text), is_json=is_json)

    def _compiled(self, text: str) -> llguidance.LLMatcher:
        limits = self._limits
        library = self.vocabulary.library
        try:
            start = compile_text(library, text, limits.lexer_fuel, limits.lexer_states)
            # The first mask builds most of the automata, for all that will be copied.
            fill(start.deep_copy(), np.zeros(self.vocabulary.mask_words, np.int32))
        except LibraryError as error:
            raise GrammarError(f"the grammar is not supported: {error}") from error
        return start


class _Cache:
    """Answers by spec, the least recently used first. Safe from any thread."""

    def __init__(self, max_bytes: int, max_entries: int) -> None:
        self._max_bytes = max_bytes
        self._max_entries = max_entries
        self._lock = threading.Lock()
        self._bytes = 0  # guarded by _lock
        # guarded by _lock
        self._entries: OrderedDict[GrammarSpec, CompiledGrammar | str] = OrderedDict()

    def get(self, spec: GrammarSpec) -> CompiledGrammar | str | None:
        with self._lock:
            found = self._entries.get(spec)
            if found is not None:
                self._entries.move_to_end(spec)
            return found

    def put(self, spec: GrammarSpec, answer: CompiledGrammar | str) -> None:
        with self._lock:
            self._remove(spec)
            self._entries[spec] = answer
            self._bytes += _weight(spec, answer)
            while self._bytes > self._max_bytes or len(self._entries) > self._max_entries:
                self._remove(next(iter(self._entries)))

    def _remove(self, spec: GrammarSpec) -> None:
        answer = self._entries.pop(spec, None)
        if answer is not None:
            self._bytes -= _weight(spec, answer)


def _given(answer: CompiledGrammar | str) -> CompiledGrammar:
    if isinstance(answer, str):
        raise GrammarError(answer)
    return answer


def _weight(spec: GrammarSpec, answer: CompiledGrammar | str) -> int:
    return len(repr(spec)) + (answer.bytes if isinstance(answer, CompiledGrammar) else len(answer))
