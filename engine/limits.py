"""What the settings and config.json decide about sizes, before anything is loaded.

Knows neither torch nor the machine: how much memory is free is `room.py`'s to find out.
"""

from typing import Final

from engine.config import EngineConfig
from engine.errors import ModelError
from engine.footprint import kv_token_bytes
from engine.model_config import ModelConfig

CPU_POOL_LIMIT_BYTES: Final = 4 << 30  # a CPU computes too slowly to fill more
# Between device and host memory: 3 ms at 45 GB/s, so that no step has to wait for long.
COPIED_BYTES_A_STEP: Final = 128 << 20
LEAST_CAPABILITY: Final = (9, 0)  # of a GPU that the CUDA kernels are written for: an H100


def check_settings(config: EngineConfig, model: ModelConfig) -> None:
    """Raises ModelError for settings that fit this checkpoint on no machine."""
    pool = None if config.max_kv_tokens is None else asked_pages(config) * config.page_size
    longest_request(config, model, pool)


def dtype_name(asked: str, checkpoint: str, *, on_cpu: bool, cpu_bfloat16: bool) -> str:
    """The dtype that `asked` stands for.

    "auto" is bfloat16 on a GPU; on a CPU float32, unless the checkpoint is bfloat16 and the CPU
    multiplies it natively (`cpu_bfloat16`).
    """
    if asked != "auto":
        return asked
    native = checkpoint == "bfloat16" and cpu_bfloat16
    return "float32" if on_cpu and not native else "bfloat16"


def host_bytes(config: EngineConfig) -> int:
    """What the prefix cache's tier in host memory takes of it, for one rank."""
    return int(config.host_cache_gib * 2**30)


def host_slots(config: EngineConfig, page_bytes: int) -> int:
    """Pages that `host_cache_gib` holds; 0 where there is to be no host tier.

    page_bytes  one page's keys and values

    Raises ModelError where it is too little.
    """
    slots = host_bytes(config) // page_bytes
    # Slot 0 is never used.
    if config.host_cache_gib and slots < 2:
        raise ModelError(
            f"host_cache_gib is {config.host_cache_gib}; it must be at least "
            f"{2 * page_bytes / 2**30:.3g}, two pages of {page_bytes} bytes"
        )
    return slots


def asked_context(config: EngineConfig, model: ModelConfig) -> int:
    """The longest request where memory is no limit, in tokens."""
    return min(config.max_model_len or model.max_positions, model.max_positions)


def asked_pages(config: EngineConfig) -> int:
    """Pages that `max_kv_tokens` asks for. Raises ModelError where it is not even one."""
    assert config.max_kv_tokens is not None
    pages = config.max_kv_tokens // config.page_size
    if pages == 0:
        raise ModelError(
            f"max_kv_tokens is {config.max_kv_tokens}; it must be at least a page, "
            f"{config.page_size} tokens"
        )
    return pages


def pool_budget(config: EngineConfig, free_bytes: int, *, on_cpu: bool) -> int:
    """Bytes that the KV pool may take of what is free once all else is loaded."""
    budget = int(free_bytes * config.memory_fraction)
    return min(budget, CPU_POOL_LIMIT_BYTES) if on_cpu else budget


def pool_pages(config: EngineConfig, model: ModelConfig, budget_bytes: int, item_bytes: int) -> int:
    """KV pages, the dummy page included: what was asked for, else as many as can be of use and fit.

    item_bytes  of one number in it

    Raises ModelError for fewer than two.
    """
    if config.max_kv_tokens is not None:
        return 1 + asked_pages(config)
    size = config.page_size * kv_token_bytes(model, item_bytes)
    pages = budget_bytes // size
    if pages < 2:
        raise ModelError(
            f"{budget_bytes} bytes for keys and values hold {pages} pages of {size} bytes; "
            "at least 2 are needed"
        )
    of_use = config.max_running * -(-asked_context(config, model) // config.page_size)
    return min(pages, 1 + of_use)


def longest_request(config: EngineConfig, model: ModelConfig, pool_tokens: int | None) -> int:
    """The longest request, in tokens: never more than the pool holds, so that any may run alone.

    pool_tokens  None: not known yet

    Raises ModelError where more was asked for.
    """
    asked, context = config.max_model_len, model.max_positions
    if asked is not None and asked > context:
        raise ModelError(
            f"max_model_len is {asked}, but the checkpoint's context is {context} tokens"
        )
    if asked is not None and pool_tokens is not None and asked > pool_tokens:
        raise ModelError(f"max_model_len is {asked}, but the KV pool holds {pool_tokens} tokens")
    return min(asked or context, pool_tokens or context)
