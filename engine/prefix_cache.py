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

from engine.descriptor import PageCopies
from engine.request import Int32Array


class Node:
    """A place in a cache, to be locked. Opaque: only the cache that made it looks inside."""

    __slots__ = ()


class Match(NamedTuple):
    """The longest cached prefix. `node` covers exactly `pages`; the root if there are none."""

    node: Node
    pages: Int32Array  # [n] of the device, in the tokens' order; they stay the cache's
    tokens: int  # n * page_size
    host_tokens: int = 0  # further ones in whole pages, in host memory


class HostCounts(NamedTuple):
    """Pages of the tier in host memory; all 0 where there is none."""

    cached: int = 0  # some of them on the device, too
    capacity: int = 0
    written: int = 0  # copied to the host since the start
    loaded: int = 0  # and back; a copy is counted once it is planned


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
    def host_counts(self) -> HostCounts:
        """What is in host memory. O(1)."""
        ...

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

    def load(self, namespace: str, token_ids: Int32Array, first: int, pages: Int32Array) -> int:
        """Has the prefix's pages from `first` on copied from host memory; how many are.

        token_ids  [n] int32
        first      a page's index in the prefix
        pages      the caller's own, where they go; read by a later step than this one
        At most `copies_left` and len(pages); fewer where no more are there. Counts as a use.
        """
        ...

    @property
    def copies_left(self) -> int:
        """Pages that the step which is being planned may still load. O(1)."""
        ...

    def take_copies(self) -> PageCopies:
        """What the step that is being planned copies between the tiers; asked last, once a step."""
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
        """[<= count] pages, now the caller's; fewer only where no more are evictable.

        With a host tier their contents are copied there first, if they are not there already.
        """
        ...

    def clear(self) -> Int32Array:
        """Every evictable page, now the caller's; nothing is left in host memory."""
        ...

    def all_pages(self) -> Int32Array:
        """[cached_pages] in no order. Walks the whole cache: for checks."""
        ...

    def check_integrity(self) -> None:
        """Asserts the cache's own invariants. Walks the whole cache."""
        ...
