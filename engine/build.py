"""From settings to an engine that is ready to step: the one place that resolves "auto"."""

import os
from pathlib import Path
from typing import Final

import torch

from engine.cache_factory import build_prefix_cache
from engine.config import EngineConfig
from engine.core import Engine, EngineFacts
from engine.cpu_executor import CpuExecutor
from engine.errors import ModelError
from engine.generation_config import eos_ids
from engine.kv_cache import pages_within
from engine.load import load_model
from engine.model_config import ModelConfig
from engine.models.decoder import Decoder
from engine.pages import PagePool
from engine.scheduler import Scheduler
from engine.weights import Progress, no_progress

CPU_POOL_LIMIT_BYTES: Final = 4 << 30  # a CPU computes too slowly to fill more


def build_engine(config: EngineConfig, progress: Progress = no_progress) -> Engine:
    """Loads the model and builds everything that runs it.

    progress  called with (bytes done, bytes in all) while weights are loaded

    Raises ModelError for a checkpoint or a setting that cannot be served.
    """
    device = _resolve_device(config.device)
    _, model = load_model(
        config.model,
        dtype=config.dtype,
        device=device,
        load_format=config.load_format,
        max_positions=config.max_model_len,
        seed=config.seed,
        progress=progress,
    )
    return assemble_engine(config, model)


def assemble_engine(config: EngineConfig, model: Decoder) -> Engine:
    """An engine around a model that is loaded already. Raises ModelError as `build_engine` does."""
    pages = _pool_pages(config, model.config, model.dtype)
    max_model_len = _context(config, model.config, pages)
    executor = CpuExecutor(
        model,
        pages=pages,
        page_size=config.page_size,
        max_rows=config.max_running,
        max_pages_per_row=-(-max_model_len // config.page_size),
        threads=config.cpu_threads or os.cpu_count(),
    )
    scheduler = Scheduler(
        pool=PagePool(pages),
        cache=build_prefix_cache(config.cache, config.page_size),
        max_running=config.max_running,
        max_model_len=max_model_len,
        prefill_budget=config.prefill_budget,
        eos_ids=_eos_ids(config.model, model.config.vocab_size),
    )
    # The CPU executor computes inside `launch`: planning ahead would only make tokens late.
    overlap = bool(config.overlap)
    facts = EngineFacts(
        max_model_len=max_model_len,
        kv_tokens=(pages - 1) * config.page_size,
        vocab_size=model.config.vocab_size,
        page_size=config.page_size,
        device="cpu",
        dtype=str(model.dtype).removeprefix("torch."),
        overlap=overlap,
    )
    return Engine(scheduler, executor, overlap=overlap, facts=facts)


def _resolve_device(name: str) -> torch.device:
    if name not in ("auto", "cpu"):
        raise ModelError(f"device is {name!r}; only cpu is supported in this version")
    return torch.device("cpu")


def _pool_pages(config: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> int:
    """KV pages, the dummy page included."""
    context = min(config.max_model_len or model.max_positions, model.max_positions)
    full_context = -(-context // config.page_size)
    if config.max_kv_tokens is not None:
        return 1 + max(1, config.max_kv_tokens // config.page_size)
    free_bytes = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    budget = int(free_bytes * config.memory_fraction)
    affordable = pages_within(min(budget, CPU_POOL_LIMIT_BYTES), model, config.page_size, dtype)
    return min(affordable, 1 + config.max_running * full_context)


def _context(config: EngineConfig, model: ModelConfig, pages: int) -> int:
    """The longest request, in tokens: never more than the pool holds, so that any may run alone."""
    asked = config.max_model_len
    if asked is not None and asked > model.max_positions:
        raise ModelError(
            f"max_model_len is {asked}, "
            f"but the checkpoint's context is {model.max_positions} tokens"
        )
    pool = (pages - 1) * config.page_size
    if asked is not None and asked > pool:
        raise ModelError(f"max_model_len is {asked}, but the KV pool holds {pool} tokens")
    return min(asked or model.max_positions, pool)


def _eos_ids(folder: Path, vocab_size: int) -> tuple[int, ...]:
    return tuple(token for token in eos_ids(folder) if 0 <= token < vocab_size)
