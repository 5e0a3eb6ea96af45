"""Prompts that are being computed, for others that begin alike to wait for.

Two requests with one prompt that start in the same step would compute it twice; where the second
starts once the first is done, it finds nearly all of it in the prefix cache.
"""

from typing import Final

import numpy as np

from engine.request import Int32Array

COMPARED: Final = (
    8  # prompts at most that one is compared with: a step's time must not depend on it
)


class Producers:
    """Rows whose prompt is not yet in the prefix cache. Owned by the engine thread."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._prompts: dict[tuple[str, bytes], dict[int, Int32Array]] = {}  # key → row → prompt
        self._keys: dict[int, tuple[str, bytes]] = {}  # of each row

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, row: int, namespace: str, token_ids: Int32Array) -> None:
        """token_ids  [n] int32, not written any more"""
        if len(token_ids) >= self._page_size:
            key = self._key(namespace, token_ids)
            self._keys[row] = key
            self._prompts.setdefault(key, {})[row] = token_ids

    def remove(self, row: int) -> None:
        """Its prompt is cached, or will never be. Does nothing for a row that is not there."""
        key = self._keys.pop(row, None)
        if key is not None:
            prompts = self._prompts[key]
            del prompts[row]
            if not prompts:
                del self._prompts[key]

    def coming_pages(self, namespace: str, token_ids: Int32Array) -> int:
        """Whole pages that begin `token_ids` and are being computed for somebody."""
        if len(token_ids) < self._page_size:
            return 0
        prompts = self._prompts.get(self._key(namespace, token_ids), {})
        last = list(prompts.values())[-COMPARED:]
        return max((_common_tokens(token_ids, one) for one in last), default=0) // self._page_size

    def _key(self, namespace: str, token_ids: Int32Array) -> tuple[str, bytes]:
        return namespace, token_ids[: self._page_size].tobytes()


def _common_tokens(one: Int32Array, other: Int32Array) -> int:
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    first = int(np.argmax(differs)) if length else 0
    return first if length and differs[first] else length
