"""Which prefix cache a name stands for."""

from dataclasses import dataclass
from typing import Literal

from engine.host_tier import HostTier
from engine.naive_cache import NaiveCache
from engine.prefix_cache import PrefixCache
from engine.radix import RadixCache
from engine.radix_node import EVICTION


@dataclass(frozen=True, slots=True)
class HostMemory:
    """A second tier for a radix cache."""

    slots: int  # pages of host memory; the first is never used
    write: Literal["through", "back"] = "through"
    copies_a_step: int = 16  # pages


def build_prefix_cache(
    kind: Literal["radix", "naive"],
    page_size: int,
    eviction: Literal["lru", "lfu", "fifo"] = "lru",
    host: HostMemory | None = None,
) -> PrefixCache:
    """An empty cache of `kind`, for pages of `page_size` tokens; a naive one evicts nothing."""
    if kind == "naive":
        return NaiveCache(page_size)
    priority = EVICTION[eviction]
    if host is None:
        return RadixCache(page_size, priority)
    tier = HostTier(
        host.slots,
        priority=priority,
        write_through=host.write == "through",
        copies_a_step=host.copies_a_step,
    )
    return RadixCache(page_size, priority, tier)
