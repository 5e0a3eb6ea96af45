"""A prefix cache as it can be drawn: the pieces used last, their sizes, locks and uses.

It tells no token, no text and no namespace: prompts are other people's, and a namespace may be a
secret. Making one takes a bounded time however large the cache is, since the engine waits for it.
"""

import heapq
from dataclasses import dataclass
from itertools import islice
from typing import Final

from engine.prefix_cache import PrefixCache
from engine.radix import RadixCache
from engine.radix_node import RadixNode

MOST_NODES: Final = 400
_MOST_CHILDREN: Final = 4096  # looked at below one node


@dataclass(frozen=True, slots=True)
class OutlineNode:
    """One edge of the tree."""

    parent: int  # its place in `nodes`, always before this one's; -1 where a prompt begins
    tokens: int
    locks: int  # requests that hold it now
    uses: int  # requests that ever held it
    hidden: int  # edges right below that are not among `nodes`


@dataclass(frozen=True, slots=True)
class CacheOutline:
    """A prefix cache, as far as it is drawn."""

    page_size: int
    cached_tokens: int
    locked_tokens: int
    total_nodes: int
    nodes: tuple[OutlineNode, ...]


def outline_of(cache: PrefixCache, most: int = MOST_NODES) -> CacheOutline:
    """At most `most` nodes, those used last first. A cache that keeps nothing has none."""
    size = cache.page_size
    nodes, total = _nodes_of(cache, most) if isinstance(cache, RadixCache) else ((), 0)
    return CacheOutline(size, cache.cached_pages * size, cache.locked_pages * size, total, nodes)


def _nodes_of(cache: RadixCache, most: int) -> tuple[tuple[OutlineNode, ...], int]:
    """Best first by last use: a node is never used after its parent, so parents come first."""
    found: list[tuple[RadixNode, int]] = []
    shown: list[int] = []  # children of each that are among them
    waiting: list[tuple[int, int, RadixNode, int]] = []
    _offer(waiting, cache.root, -1, most)
    while waiting and len(found) < most:
        _, _, node, parent = heapq.heappop(waiting)
        if parent >= 0:
            shown[parent] += 1
        found.append((node, parent))
        shown.append(0)
        _offer(waiting, node, len(found) - 1, most)
    nodes = tuple(
        OutlineNode(parent, len(node.tokens), node.locks, node.uses, len(node.children) - below)
        for (node, parent), below in zip(found, shown, strict=True)
    )
    return nodes, cache.node_count


def _offer(
    waiting: list[tuple[int, int, RadixNode, int]], node: RadixNode, index: int, most: int
) -> None:
    children = islice(node.children.values(), _MOST_CHILDREN)
    for child in heapq.nlargest(most, children, key=_last_use):
        heapq.heappush(waiting, (-child.last_use, child.serial, child, index))


def _last_use(node: RadixNode) -> int:
    return node.last_use
