"""llguidance as the rest uses it: grammars compiled, masks filled, its errors as LibraryError.

A compiled grammar and its copies share one lexer behind a lock in the library: what one of them has
built of the automata, all have. Knows nothing of requests, specs or processes.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from engine.grammar.native import llguidance
from engine.request import Int32Array, Int64Array

_MESSAGE_CHARS: Final = 300


class LibraryError(Exception):
    """The library refuses a grammar, or cannot go on with it; one line that may be shown."""


def compile_text(
    vocabulary: llguidance.LLTokenizer, text: str, lexer_fuel: int, lexer_states: int
) -> llguidance.LLMatcher:
    """A matcher at the start of a grammar. Raises LibraryError."""
    limits = llguidance.LLParserLimits(
        initial_lexer_fuel=lexer_fuel, max_lexer_states=lexer_states, verbose_errors=False
    )
    try:
        matcher = llguidance.LLMatcher(vocabulary, text, log_level=0, limits=limits)
    except BaseException as error:
        raise _panic(error) from error
    check(matcher)
    return matcher


def fill(matcher: llguidance.LLMatcher, row: Int32Array) -> None:
    """Sets the bits of the ids that may come next in `row`, [words] int32, and clears the others.

    Where the grammar is complete the EOS ids are among them. Raises LibraryError.
    """
    assert row.dtype == np.int32 and row.ndim == 1 and row.flags.c_contiguous
    try:
        matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
    except BaseException as error:
        raise _panic(error) from error
    check(matcher)  # the library fills an erring matcher's mask with the EOS ids


def check(matcher: llguidance.LLMatcher) -> None:
    """Raises LibraryError where `matcher` is in its error state, which it never leaves."""
    if matcher.is_error():
        raise LibraryError(_shown(matcher.get_error()))


def allowed_ids(row: Int32Array) -> Int64Array:
    """The ids whose bits are set, ascending."""
    bits: NDArray[np.uint8] = np.unpackbits(row.view(np.uint8), bitorder="little")
    return np.flatnonzero(bits).astype(np.int64)


def _panic(error: BaseException) -> BaseException:
    """A panic in Rust arrives as a BaseException; anything else goes on as it is."""
    if type(error).__name__ != "PanicException":
        return error
    return LibraryError("the grammar is beyond what the library can do")


def _shown(message: str) -> str:
    """The line of a message that says what is wrong; the others quote the grammar."""
    if message.startswith("NoExtensionBias"):
        return "no output satisfies it"
    lines = [line.strip() for line in message.strip().splitlines()] or [""]
    shown = next((line for line in lines if line.startswith("error: ")), lines[0])
    return shown if len(shown) <= _MESSAGE_CHARS else shown[:_MESSAGE_CHARS] + "…"
