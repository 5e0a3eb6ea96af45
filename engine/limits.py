"""What the settings and config.json decide about sizes, before anything is loaded.

Knows neither torch nor the machine: what memory allows is `build.py`'s to find out.
"""

from engine.config import EngineConfig
from engine.errors import ModelError
from engine.model_config import ModelConfig


def check_settings(config: EngineConfig, model: ModelConfig) -> None:
    """Raises ModelError for settings that fit this checkpoint on no machine."""
    pool = None if config.max_kv_tokens is None else asked_pages(config) * config.page_size
    longest_request(config, model, pool)


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
