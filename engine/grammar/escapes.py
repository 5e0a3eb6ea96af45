"""Which tokens would spell a character of JSON as `\\u....` or `\\/`, so that none is sampled.

The library keeps a listed name from coming again, but not `"\\u0061"` beside `"a"`: the same name
to whoever reads the output, with a value that its schema did not see. Without these two escapes
every name has one spelling. Backslashes are met in strings only, so counting them is all it takes.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

_BACKSLASH: Final = ord("\\")
_KEPT_OUT: Final = frozenset(b"u/")


class EscapeGuard:
    """Per token, what it does to the spelling. Safe from any thread: written by nobody.

    `escaping` is 1 right after a backslash that is not itself escaped, else 0.

    keep   [2, mask_words] int32: bits of the tokens that may come, by `escaping`
    after  [2, width] uint8: `escaping` after a token, by `escaping` before it
    """

    def __init__(self, token_bytes: list[bytes], mask_words: int) -> None:
        """token_bytes  by id; ids beyond are kept and change nothing"""
        bits = np.ones((2, mask_words * 32), np.uint8)
        self.after: NDArray[np.uint8] = np.zeros((2, mask_words * 32), np.uint8)
        for token_id, text in enumerate(token_bytes):
            for escaping in (0, 1):
                if escaping or _BACKSLASH in text:
                    kept, self.after[escaping, token_id] = _read(text, escaping)
                    bits[escaping, token_id] = kept
        self.keep: NDArray[np.int32] = np.packbits(bits, axis=1, bitorder="little").view(np.int32)


def _read(text: bytes, escaping: int) -> tuple[bool, int]:
    """Whether a token may come, and `escaping` after it."""
    for byte in text:
        if escaping and byte in _KEPT_OUT:
            return False, 0
        escaping = int(not escaping and byte == _BACKSLASH)
    return True, escaping
