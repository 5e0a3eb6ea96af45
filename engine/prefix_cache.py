"""What a prefix cache promises: which pages already hold the KV of a prompt's beginning.

Knows neither rows nor requests nor the page pool: whoever calls moves the pages.

Rules
- The key is (namespace, token ids), compared exactly; namespaces share nothing. Only whole pages.
- A page belongs to the cache from the `insert` that takes it over to the `evict` or `clear` that
  returns it. `Inserted` says which pages those are.
- An edge's pages may be evicted unless a lock covers them. A `Node` that was not locked is good
  until the next `evict` or `clear` only; a locked one until its `unlock`.
"""

from typing import NamedTuple, Protocol

from engine.request import Int32Array


class Node:
    """A place in a cache, to be locked. Opaque: only the cache that made it looks inside."""

    __slots__ = ()


class Match(NamedTuple):
    """The longest cached prefix. `node` covers exactly `pages`; the root if there are none."""

    node: Node
    pages: Int32Array  # [n] in the tokens' order; they stay the cache's
    tokens: int  # n * page_size


class Inserted(NamedTuple):
    """What an insertion came to. The cache owns every page named here, and no other.

    pages[:existing_pages] were cached before: where the caller's own differ, these are duplicates,
    still the caller's, to be freed once nothing reads them. pages[existing_pages:] are the caller's
    own, taken over now. A cache that keeps nothing answers with no pages: all stay the caller's.
    """

    node: Node  # covers exactly `pages`
    pages: Int32Array  # [n] canonical pages of the inserted prefix
    existing_pages: int  # <= n


class PrefixCache(Protocol):
    """Pages by the tokens they hold. Owned by the engine thread."""

    page_size: int  # tokens a page holds
    keeps: bool  # False where an insertion never makes a later match longer

    @property
    def evictable_pages(self) -> int:
        """Cached pages under no lock. O(1)."""
        ...

    @property
    def locked_pages(self) -> int:
        """Cached pages under a lock. O(1)."""
        ...

    @property
    def cached_pages(self) -> int:
        """All of them: evictable and locked. O(1)."""
        ...

    def match(self, namespace: str, token_ids: Int32Array) -> Match:
        """The longest cached prefix in whole pages; counts as a use of it.

        token_ids  [n] int32, without the prompt's last token: one position is always computed
        """
        ...

    def lock(self, node: Node) -> None:
        """Protects the node and all before it from eviction. Counted: one `unlock` for each."""
        ...

    def unlock(self, node: Node) -> None: ...

    def insert(self, namespace: str, token_ids: Int32Array, pages: Int32Array) -> Inserted:
        """Caches the whole pages of a prefix; counts as a use of it.

        token_ids  [n] int32, copied; the tokens of a partial last page are ignored
        pages      [>= n // page_size] int32, copied; pages[i] holds tokens
                   [i * page_size, (i + 1) * page_size)
        Pages that come from an earlier `match` must still be locked.
        """
        ...

    def evict(self, count: int) -> Int32Array:
        """[<= count] pages, now the caller's; fewer only where no more are evictable."""
        ...

    def clear(self) -> Int32Array:
        """Every evictable page, now the caller's."""
        ...

    def all_pages(self) -> Int32Array:
        """[cached_pages] in no order. Walks the whole cache: for checks."""
        ...

    def check_integrity(self) -> None:
        """Asserts the cache's own invariants. Walks the whole cache."""
        ...
