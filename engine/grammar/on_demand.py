"""The grammar compiler, made when the first grammar comes: most servers never see one."""

import threading
from collections.abc import Callable
from typing import Final

from engine.errors import ModelError
from engine.grammar.compiler import GrammarCompiler
from engine.grammar.matcher import CompiledGrammar
from engine.grammar.spec import GrammarError, GrammarSpec

_NOT_NOW: Final = "grammars could not be prepared; try again"


class GrammarsOnDemand:
    """Compiles grammars. Safe from any thread; the first call takes a second more."""

    def __init__(self, make: Callable[[], GrammarCompiler]) -> None:
        """make  may raise ModelError: the tokenizer suits no grammars"""
        self._make = make
        self._lock = threading.Lock()
        # Written under _lock, once. Read without it where nobody may wait for it to be made.
        self._made: GrammarCompiler | ModelError | None = None

    def try_known(self, spec: GrammarSpec) -> CompiledGrammar | None:
        """As `compile`, where the answer is kept; None where it is not."""
        made = self._made
        return made.try_known(spec) if isinstance(made, GrammarCompiler) else None

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """The compiled grammar, or GrammarError with the reason."""
        with self._lock:
            if self._made is None:
                try:
                    self._made = self._make()
                except (ModelError, OSError) as error:
                    if isinstance(error, OSError) or isinstance(error.__cause__, OSError):
                        raise GrammarError(_NOT_NOW, transient=True) from error  # no file was free
                    self._made = error
            made = self._made
        if isinstance(made, ModelError):
            raise GrammarError(f"this model cannot be constrained: {made}")
        return made.compile(spec)

    def close(self) -> None:
        """Ends what the compiler has started."""
        with self._lock:
            if isinstance(self._made, GrammarCompiler):
                self._made.close()
