"""Which prefix cache a name stands for."""

from typing import Literal

from engine.naive_cache import NaiveCache
from engine.prefix_cache import PrefixCache
from engine.radix import RadixCache
from engine.radix_node import EVICTION


def build_prefix_cache(
    kind: Literal["radix", "naive"],
    page_size: int,
    eviction: Literal["lru", "lfu", "fifo"] = "lru",
) -> PrefixCache:
    """An empty cache of `kind`, for pages of `page_size` tokens; a naive one evicts nothing."""
    if kind == "naive":
        return NaiveCache(page_size)
    return RadixCache(page_size, EVICTION[eviction])
