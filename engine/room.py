"""Whether a model has room, before any of it is loaded: on each GPU, and in the machine's memory.

Raises ModelError for what would fail half-way through loading, or be killed by the system. How much
the KV pool gets of what is left is `build.py`'s to decide.
"""

from typing import Final

import torch

from engine.config import EngineConfig
from engine.errors import ModelError
from engine.host_memory import available_bytes
from engine.kv_cache import page_bytes
from engine.limits import asked_context, asked_pages, host_bytes, host_slots
from engine.load import outline, resolve_dtype
from engine.sharding import Share
from gpu_ops.collectives import RankGroup

# What ranks on equal GPUs may differ by; beyond it, one GPU is not theirs alone.
_MOST_UNEVEN_BYTES: Final = 2 << 30


def refuse_uneven_memory(group: RankGroup, device: torch.device) -> None:
    """Raises ModelError, on every rank, where one GPU has much less room than another."""
    own = torch.tensor([torch.cuda.mem_get_info(device)[0]], dtype=torch.int64, device=device)
    free = group.all_gather(own)
    least, most = int(free.min()), int(free.max())
    if most - least > _MOST_UNEVEN_BYTES:
        raise ModelError(
            f"the ranks' GPUs have between {least / 1e9:.1f} and {most / 1e9:.1f} GB free: "
            "something else uses one of them"
        )


def refuse_beyond_memory(
    config: EngineConfig, share: Share, device: torch.device, ranks: int
) -> None:
    """Raises ModelError for a model that would fail half-way through loading, or be killed.

    share  this rank's, of whatever machine
    ranks  that share this machine's memory
    """
    shape = share.config
    dtype = resolve_dtype(config.dtype, shape, device)
    model = outline(share, dtype, asked_context(config, shape))
    weights = sum(place.tensor.nbytes for place in model.destinations().values())
    weights += model.cos_sin.nbytes
    pages = 2 if config.max_kv_tokens is None else 1 + asked_pages(config)
    pool = pages * page_bytes(shape, config.page_size, dtype)
    on_cuda = device.type == "cuda"
    # On a CPU the ranks share the machine's memory.
    free = torch.cuda.mem_get_info(device)[0] if on_cuda else available_bytes() // ranks
    if weights + pool > free:
        kept = f"{pool / 1e9:.1f} GB of keys and values"
        if config.max_kv_tokens is not None:
            kept += f" (max_kv_tokens is {config.max_kv_tokens})"
        raise ModelError(
            f"{config.model}: {weights / 1e9:.1f} GB of weights in {str(dtype).split('.')[-1]} and "
            f"{kept} are needed, but {free / 1e9:.1f} GB of memory are free on {device}"
        )
    host_slots(config, page_bytes(shape, config.page_size, dtype))  # is it enough for a page?
    _refuse_host_beyond_memory(config, ranks, beside=0 if on_cuda else weights + pool)


def _refuse_host_beyond_memory(config: EngineConfig, ranks: int, *, beside: int) -> None:
    """beside  bytes of the same memory that a rank's part of the model takes"""
    host, free = host_bytes(config), available_bytes() // ranks
    if host and host + beside > free:
        model = f", and {beside / 1e9:.1f} GB for the model are needed" if beside else " are needed"
        raise ModelError(
            f"host_cache_gib is {config.host_cache_gib}: {host / 1e9:.1f} GB{model}, but "
            f"{free / 1e9:.1f} GB of memory are free on the host"
        )
