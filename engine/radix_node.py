"""One node of the radix tree, and what makes one node go before another when pages are wanted."""

from collections.abc import Callable
from typing import Final

from engine.prefix_cache import Node
from engine.request import Int32Array

Key = tuple[str, bytes]  # namespace, the int32 tokens of one page


class RadixNode(Node):
    """An edge and what hangs below it. Owned by the engine thread."""

    __slots__ = (
        "children",
        "created",
        "last_use",
        "locks",
        "namespace",
        "pages",
        "parent",
        "queued",
        "serial",
        "tokens",
        "uses",
    )

    def __init__(
        self,
        namespace: str,
        tokens: Int32Array,
        pages: Int32Array,
        parent: "RadixNode | None",
        serial: int,
        now: int,
    ) -> None:
        self.namespace = namespace
        self.tokens = tokens  # [len(pages) * page_size] int32
        self.pages = pages  # [>= 1] int32; none at the root alone
        self.parent = parent  # None at the root, and once evicted
        self.children: dict[Key, RadixNode] = {}
        self.serial = serial  # unique: it decides between equal priorities
        self.locks = 0
        self.created = now
        self.last_use = now
        self.uses = 0  # locks ever taken
        self.queued = False  # has its entry in the heap


Priority = Callable[[RadixNode], tuple[int, int]]  # the lowest goes first; it must never fall


def least_recently_used(node: RadixNode) -> tuple[int, int]:
    return node.last_use, 0


def least_frequently_used(node: RadixNode) -> tuple[int, int]:
    return node.uses, node.last_use


def first_in_first_out(node: RadixNode) -> tuple[int, int]:
    return node.created, 0


EVICTION: Final[dict[str, Priority]] = {
    "lru": least_recently_used,
    "lfu": least_frequently_used,
    "fifo": first_in_first_out,
}
