"""From settings to an engine that is ready to step: the one place that resolves "auto"."""

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.broadcast import BroadcastExecutor, StepSink
from engine.cache_factory import HostMemory, build_prefix_cache
from engine.config import TARGET_ITL_MS, EngineConfig
from engine.core import Engine, EngineFacts
from engine.cpu_executor import CpuExecutor
from engine.errors import ModelError
from engine.executor import Executor
from engine.generation_config import eos_ids
from engine.host_memory import available_bytes
from engine.kv_cache import page_bytes
from engine.limits import (
    COPIED_BYTES_A_STEP,
    LEAST_CAPABILITY,
    asked_context,
    check_settings,
    host_bytes,
    host_slots,
    longest_request,
    pool_budget,
    pool_pages,
)
from engine.load import load_model
from engine.model_config import read_model_config
from engine.models.decoder import Decoder
from engine.pages import PagePool
from engine.prefix_cache import PrefixCache
from engine.room import refuse_beyond_memory, refuse_uneven_memory
from engine.scheduler import Scheduler
from engine.sharding import share_of
from engine.timeouts import Timeouts
from engine.weights import Progress, no_progress
from gpu_ops.collectives import RankGroup


def build_engine(
    config: EngineConfig,
    progress: Progress = no_progress,
    *,
    group: RankGroup | None = None,
    others: StepSink | None = None,
) -> Engine:
    """Loads the model and builds everything that runs it.

    progress  called with (bytes done, bytes in all) while weights are loaded
    group     of ranks that share the model, of which this is the first
    others    where the step descriptors of all others go; they run `build_executor` meanwhile

    Raises ModelError for a checkpoint or a setting that cannot be served.
    """
    return assemble_engine(config, _load(config, progress, group), others)


def build_executor(
    config: EngineConfig, group: RankGroup, progress: Progress = no_progress
) -> Executor:
    """What a rank that decides nothing runs: see `build_engine`, which rank 0 calls meanwhile."""
    return _built(config, _load(config, progress, group)).executor


def _load(config: EngineConfig, progress: Progress, group: RankGroup | None) -> Decoder:
    shape = read_model_config(config.model)
    check_settings(config, shape)
    device = _resolve_device(config)
    share = share_of(shape) if group is None else share_of(shape, group.rank, group.size)
    if group is not None and device.type == "cuda":
        refuse_uneven_memory(group, device)
    refuse_beyond_memory(config, share, device, _ranks_here(group))
    eos_ids(config.model)  # its files may be broken: better told now than after the weights
    _, model = load_model(
        config.model,
        dtype=config.dtype,
        device=device,
        load_format=config.load_format,
        max_positions=config.max_model_len,
        seed=config.seed,
        group=group,
        progress=progress,
    )
    return model


def assemble_engine(config: EngineConfig, model: Decoder, others: StepSink | None = None) -> Engine:
    """An engine around a model that is loaded already. Raises ModelError as `build_engine` does."""
    on_cuda = model.device.type == "cuda"
    built = _built(config, model)
    executor = built.executor
    if others is not None:
        executor = BroadcastExecutor(executor, others)
    pages = executor.pages
    scheduler = Scheduler(
        pool=PagePool(pages),
        cache=_prefix_cache(config, model),
        max_running=config.max_running,
        max_model_len=built.max_model_len,
        # Memory was measured for a step of one context; many whole prompts would need more.
        prefill_budget=config.prefill_budget or built.max_model_len,
        eos_ids=_eos_ids(config.model, model.config.vocab_size),
        vocab_size=model.config.vocab_size,
        policy=config.schedule_policy,
        preemption_threshold=config.preemption_threshold,
        target_itl_s=_target_itl_s(config, on_cuda),
        trace_steps=config.trace_steps,
        timeouts=Timeouts(config.queue_timeout_s, config.running_timeout_s),
        seed=config.seed,
    )
    # The CPU executor computes inside `launch`: planning ahead would only make tokens late.
    overlap = on_cuda if config.overlap is None else config.overlap
    facts = EngineFacts(
        max_model_len=built.max_model_len,
        kv_tokens=(pages - 1) * config.page_size,
        vocab_size=model.config.vocab_size,
        page_size=config.page_size,
        device=str(model.device),
        dtype=str(model.dtype).removeprefix("torch."),
        overlap=overlap,
        rank_sums=_rank_sums(model.group),
    )
    return Engine(scheduler, executor, overlap=overlap, facts=facts)


def _target_itl_s(config: EngineConfig, on_cuda: bool) -> float | None:
    target_ms = config.target_itl_ms
    if target_ms is None:
        # A CPU's steps take longer than that without any prompt: prompts would only go slowly.
        target_ms = TARGET_ITL_MS if on_cuda else 0.0
    return target_ms / 1e3 if target_ms else None


def _prefix_cache(config: EngineConfig, model: Decoder) -> PrefixCache:
    size = page_bytes(model.config, config.page_size, model.dtype)
    slots, host = _host_slots(config, model), None
    if slots:
        host = HostMemory(slots, config.host_cache_write, max(1, COPIED_BYTES_A_STEP // size))
    return build_prefix_cache(config.cache, config.page_size, config.cache_eviction, host)


@dataclass(frozen=True, slots=True)
class _Built:
    """What depends on the device."""

    executor: Executor
    max_model_len: int


def _built(config: EngineConfig, model: Decoder) -> _Built:
    return (_on_cuda if model.device.type == "cuda" else _on_cpu)(config, model)


def _on_cpu(config: EngineConfig, model: Decoder) -> _Built:
    ranks = _ranks_here(model.group)
    # The host tiers take their memory as they are filled.
    available = max(0, available_bytes() - ranks * host_bytes(config))
    budget = pool_budget(config, available, on_cpu=True) // ranks
    pages = _pool_pages(config, model, budget)
    max_model_len = longest_request(config, model.config, (pages - 1) * config.page_size)
    executor = CpuExecutor(
        model,
        pages=pages,
        page_size=config.page_size,
        max_rows=config.max_running,
        max_pages_per_row=-(-max_model_len // config.page_size),
        host_slots=_host_slots(config, model),
        threads=config.cpu_threads or max(1, (os.cpu_count() or 1) // ranks),
    )
    return _Built(executor, max_model_len)


def _rank_sums(group: RankGroup | None) -> str:
    if group is None:
        return ""
    return "apart" if group.fused is None else "fused"


def _ranks_here(group: RankGroup | None) -> int:
    """Ranks that share this machine's memory and processors."""
    return 1 if group is None else group.local_size


def _host_slots(config: EngineConfig, model: Decoder) -> int:
    return host_slots(config, page_bytes(model.config, config.page_size, model.dtype))


def _on_cuda(config: EngineConfig, model: Decoder) -> _Built:
    # Only where there is a device: a CPU needs nothing of what these import.
    from engine.cuda_executor import CudaExecutor
    from engine.cuda_memory import measure_step_bytes
    from engine.flashinfer_prefill import find_flashinfer
    from engine.graph_sizes import buckets_up_to

    context = asked_context(config, model.config)
    buckets: tuple[int, ...] = ()
    if config.cuda_graph_max_rows and model.may_be_captured:
        buckets = buckets_up_to(min(config.max_running, config.cuda_graph_max_rows))
    try:
        flashinfer = find_flashinfer(
            model.config, model.dtype, model.device, config.prefill_attention
        )
    except ValueError as error:
        raise ModelError(str(error)) from error
    measured = measure_step_bytes(
        model,
        page_size=config.page_size,
        max_rows=config.max_running,
        max_pages_per_row=-(-context // config.page_size),
        prefill_tokens=config.prefill_budget or context,
        buckets=buckets,
        flashinfer=flashinfer,
    )
    pages = _pool_pages(config, model, pool_budget(config, measured.left, on_cpu=False))
    max_model_len = longest_request(config, model.config, (pages - 1) * config.page_size)
    executor = CudaExecutor(
        model,
        pages=pages,
        page_size=config.page_size,
        max_rows=config.max_running,
        max_pages_per_row=-(-max_model_len // config.page_size),
        flashinfer=flashinfer,
        host_slots=_host_slots(config, model),
    )
    if buckets:
        executor.capture_graphs(buckets)
        executor.capture_small_steps()
    return _Built(executor, max_model_len)


def _resolve_device(config: EngineConfig) -> torch.device:
    """auto is a CUDA device that the kernels know, if there is one."""
    name = config.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() and _is_known_gpu() else "cpu"
    device = torch.device(name)
    if device.type == "cpu":
        return device
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus == 0:
        raise ModelError(f"device is {config.device!r}, but torch finds no GPU that it can use")
    if (device.index or 0) >= gpus:
        raise ModelError(f"device is {config.device!r}, but the last GPU is cuda:{gpus - 1}")
    if not _is_known_gpu(device.index or 0):
        raise ModelError("the CUDA kernels need compute capability 9.0 (H100) or later")
    if config.dtype == "float16":
        raise ModelError("float16 is not supported on CUDA; bfloat16 and float32 are")
    return torch.device("cuda", device.index or 0)


def _is_known_gpu(index: int = 0) -> bool:
    return torch.cuda.get_device_capability(index) >= LEAST_CAPABILITY


def _pool_pages(config: EngineConfig, model: Decoder, budget_bytes: int) -> int:
    """KV pages, the dummy page included, of which all ranks have as many as the poorest."""
    pages = pool_pages(config, model.config, budget_bytes, model.dtype.itemsize)
    if model.group is None:
        return pages
    own = torch.tensor([pages], dtype=torch.int64, device=model.device)
    return int(model.group.all_gather(own).min())  # waits until every rank has said its number


def _eos_ids(folder: Path, vocab_size: int) -> tuple[int, ...]:
    return tuple(token for token in eos_ids(folder) if 0 <= token < vocab_size)
