"""From GPUs, a checkpoint's config and settings to a capacity report, before anything is loaded.

Guarantees: what the engine decides by a formula (pool, pages, contexts, graphs) is reckoned by the
same functions. What it measures on the GPU (the driver's own memory, the largest prefill, graphs)
is guessed here from what H200s were seen to take; perf/bench_capacity.py holds both against each
other.

Knows neither NVML nor files: see nvml.py and command.py.
"""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from engine.config import EngineConfig
from engine.errors import ModelError
from engine.footprint import (
    ITEM_BYTES,
    active_parameters,
    decode_flops,
    decode_kv_tokens,
    kv_token_bytes,
    parameters,
    read_parameters,
    rope_bytes,
    workspace_bytes,
)
from engine.graph_sizes import MOST_TOKENS, buckets_up_to, token_buckets_up_to
from engine.limits import (
    LEAST_CAPABILITY,
    asked_context,
    dtype_name,
    longest_request,
    pool_budget,
    pool_pages,
)
from engine.model_config import ModelConfig
from engine.sharding import Share, share_of
from runtime.capacity.gpu import Gpu, Gpus
from runtime.capacity.report import (
    Capacity,
    Concurrency,
    DecodeFloor,
    Host,
    ModelSize,
    Split,
)
from runtime.capacity.visible import visible_gpus

# What a process takes whatever its model: CUDA's context, the libraries' code and their buffers. On
# an H200 (torch 2.11, CUDA 13.0): 902 MB before the first step, and 190 MB with it.
CONTEXT_BYTES: Final = 1 << 30
# One CUDA graph of a decode step, for each of the model's layers. They share one pool, which is
# smaller than what a prefill leaves.
GRAPH_LAYER_BYTES: Final = 100 << 10
# Prompt and output tokens of public capacity tables.
CELLS: Final = ((128, 128), (1024, 128), (128, 1024), (2048, 2048), (8192, 512))
_BATCHES: Final = (1, 8, 32, 64, 128, 256, 512, 1024)
_CONTEXTS: Final = (1024, 8192)
_RANKS: Final = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class Asked:
    """What a report is about, and on what."""

    config: EngineConfig
    model: ModelConfig
    name: str
    ranks: int = 1
    cpu_bfloat16: bool = False  # the CPU multiplies it natively


def report_on(
    devices: Gpus,
    host: Host,
    asked: Asked | None,
    environ: Mapping[str, str] = os.environ,
) -> Capacity:
    """The report; without `asked`, of the machine alone."""
    notes = _notes_on(devices)
    bare = Capacity(
        at_s=time.time(), host=host, devices=devices, model=None, device=None, ranks=1, split=None,
        splits=(), concurrency=(), decode=(), measured_kv_tokens=None, notes=tuple(notes),
    )  # fmt: skip
    return bare if asked is None else _with_model(bare, asked, environ)


def _with_model(bare: Capacity, asked: Asked, environ: Mapping[str, str]) -> Capacity:
    config, model, notes = asked.config, asked.model, list(bare.notes)
    gpus = visible_gpus(bare.devices.gpus, environ)
    used = _used_gpus(config.device, gpus, notes)
    on_cpu = not used
    item_bytes = ITEM_BYTES[_dtype(asked, on_cpu)]
    sizes = _Sizes(config, model, item_bytes)
    splits = [sizes.on_cpu(bare.host)] if on_cpu else sizes.over_each(used)
    if not on_cpu and asked.ranks not in _RANKS and sizes.share(asked.ranks) is not None:
        splits.append(sizes.over(asked.ranks, used))
    chosen = next((each for each in splits if each.ranks == asked.ranks), None)
    if chosen is None and on_cpu:
        notes.append(f"What {asked.ranks} ranks on one CPU have room for is not reckoned.")
    elif chosen is None:
        notes.append(f"{asked.ranks} GPUs cannot share this model.")
    size = ModelSize(
        name=asked.name,
        architecture=model.architecture,
        dtype=_dtype(asked, on_cpu),
        parameters=parameters(model),
        active_parameters=active_parameters(model),
        context_tokens=asked_context(config, model),
        weight_bytes=parameters(model) * item_bytes,
        kv_bytes_per_token=kv_token_bytes(model, item_bytes),
    )
    return Capacity(
        at_s=bare.at_s, host=bare.host, devices=bare.devices, model=size,
        device="cpu" if on_cpu else f"cuda:{used[0].index}", ranks=asked.ranks, split=chosen,
        splits=tuple(splits),
        concurrency=() if chosen is None else sizes.concurrency(chosen),
        decode=() if chosen is None or on_cpu else sizes.decode(chosen, used[0]),
        measured_kv_tokens=None, notes=tuple(notes),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Sizes:
    """One model under certain settings."""

    config: EngineConfig
    model: ModelConfig
    item_bytes: int

    def over_each(self, used: Sequence[Gpu]) -> list[Split]:
        """Over every usual number of GPUs that can share the model."""
        return [self.over(ranks, used) for ranks in _RANKS if self.share(ranks) is not None]

    def share(self, ranks: int) -> Share | None:
        """What the fullest of so many ranks holds; None where they cannot share the model."""
        try:
            shares = [share_of(self.model, rank, ranks) for rank in range(ranks)]
        except ModelError:
            return None
        return max(shares, key=lambda each: parameters(each.config, each.vocabulary_rows))

    def over(self, ranks: int, used: Sequence[Gpu]) -> Split:
        """Over so many GPUs, all as free as the fullest of those that are there."""
        available = used[:ranks]
        free = [g.activity.memory.free_bytes for g in available if g.activity.memory is not None]
        config, context = self.config, asked_context(self.config, self.model)
        workspace = workspace_bytes(
            self.model,
            self.item_bytes,
            prefill_tokens=config.prefill_budget or context,
            rows=config.max_running,
            context=context,
        )
        sizes: tuple[int, ...] = ()
        if config.cuda_graph_max_rows:
            most = min(config.max_running, config.cuda_graph_max_rows)
            sizes = (*buckets_up_to(most), *token_buckets_up_to(MOST_TOKENS))
        graphs = len(sizes) * self.model.layers * GRAPH_LAYER_BYTES
        return self._split(
            ranks,
            free=min(free) if free else 0,
            context=CONTEXT_BYTES,
            workspace=workspace,
            graphs=graphs,
            available=len(available) == ranks,
        )

    def on_cpu(self, host: Host) -> Split:
        return self._split(
            1, free=host.memory_available_bytes or 0, context=0, workspace=0, graphs=0,
            available=True, on_cpu=True,
        )  # fmt: skip

    def _split(
        self,
        ranks: int,
        *,
        free: int,
        context: int,
        workspace: int,
        graphs: int,
        available: bool,
        on_cpu: bool = False,
    ) -> Split:
        config, share = self.config, self.share(ranks)
        assert share is not None
        model = share.config
        weights = parameters(model, share.vocabulary_rows) * self.item_bytes
        weights += rope_bytes(model, asked_context(config, model))
        left = free - context - weights - workspace - graphs
        pages, why_not = 0, None
        try:
            budget = pool_budget(config, max(0, left), on_cpu=on_cpu)
            pages = pool_pages(config, model, budget, self.item_bytes)
            longest_request(config, model, (pages - 1) * config.page_size)
        except ModelError as error:
            why_not = str(error)
        token_bytes = kv_token_bytes(model, self.item_bytes)
        pool = pages * config.page_size * token_bytes
        if pool > max(0, left):
            why_not = f"{weights + pool} bytes are needed, and {free} are free"
        tokens = 0 if why_not is not None else (pages - 1) * config.page_size
        return Split(
            ranks, weights, token_bytes, context, workspace, graphs, pool if tokens else 0, tokens,
            available, why_not is None, why_not,
        )  # fmt: skip

    def concurrency(self, split: Split) -> tuple[Concurrency, ...]:
        """For each of CELLS: requests that fit at their longest, all at the same time."""
        config = self.config
        context = asked_context(config, self.model)
        found = []
        for prompt, output in CELLS:
            if prompt + output > min(context, split.kv_tokens):
                found.append(Concurrency(prompt, output, 0, "context"))
                continue
            pages = -(-(prompt + output) // config.page_size)
            fit = split.kv_tokens // (pages * config.page_size)
            limit = "memory" if fit < config.max_running else "max_running"
            found.append(Concurrency(prompt, output, min(fit, config.max_running), limit))
        return tuple(found)

    def decode(self, split: Split, gpu: Gpu) -> tuple[DecodeFloor, ...]:
        """Floors of decode steps that fit, by batch and context."""
        most = asked_context(self.config, self.model)
        return tuple(
            self._floor(batch, context, split, gpu)
            for context in _CONTEXTS
            for batch in _BATCHES
            if context <= most
            and batch <= self.config.max_running
            and batch * context <= split.kv_tokens
        )

    def _floor(self, batch: int, context: int, split: Split, gpu: Gpu) -> DecodeFloor:
        share, peak = self.share(split.ranks), gpu.peak
        assert share is not None
        rows = read_parameters(share.config, batch, share.vocabulary_rows)
        attended = batch * decode_kv_tokens(self.model, context) * split.kv_bytes_per_token
        read = int(rows * self.item_bytes + attended)
        flops = decode_flops(self.model, batch, context) // split.ranks
        bandwidth_s = None if peak.bytes_per_s is None else read / peak.bytes_per_s
        compute_s = None if peak.bf16_flops is None else flops / peak.bf16_flops
        known = [each for each in (bandwidth_s, compute_s) if each is not None]
        floor_s = max(known) if known else None
        rate = None if floor_s is None else batch / floor_s
        return DecodeFloor(
            batch, context, read, flops, bandwidth_s, compute_s, floor_s, rate
        )  # fmt: skip


def _used_gpus(device: str, gpus: Sequence[Gpu], notes: list[str]) -> list[Gpu]:
    """From the first that the model would run on; none: it runs on the CPU."""
    if device == "cpu":
        return []
    first = int(device.partition(":")[2] or 0) if device.startswith("cuda") else 0
    used = list(gpus[first:])
    if not used:
        notes.append("No GPU can be used: the model runs on the CPU.")
        return []
    capability = used[0].compute_capability
    if capability is not None and capability < LEAST_CAPABILITY:
        name = used[0].name or f"GPU {used[0].index}"
        notes.append(f"{name} is older than what the CUDA kernels need (9.0): on the CPU.")
        return []
    return used


def _dtype(asked: Asked, on_cpu: bool) -> str:
    return dtype_name(
        asked.config.dtype, asked.model.dtype, on_cpu=on_cpu, cpu_bfloat16=asked.cpu_bfloat16
    )


def _notes_on(devices: Gpus) -> list[str]:
    notes = [] if devices.absent is None else [f"No GPU is seen: {devices.absent}."]
    for gpu in devices.gpus:
        notes += [f"GPU {gpu.index}: {each.what}: {each.why}." for each in gpu.faults]
        for process in gpu.processes or ():
            if not process.is_ours:
                size = "" if process.used_bytes is None else f" ({process.used_bytes >> 20} MiB)"
                name = process.name or "of another container"
                user = f" of {process.user}" if process.user else ""
                notes.append(
                    f"GPU {gpu.index} is used by another program: "
                    f"process {process.pid}, {name}{user}{size}."
                )
        if gpu.mig is not None and gpu.mig.enabled:
            count = len(gpu.mig.instances)
            notes.append(f"GPU {gpu.index} is cut into {count} MIG instances; one is used of them.")
        if gpu.peak.bytes_per_s is None:
            notes.append(f"GPU {gpu.index}: its bandwidth is not known, so no floors are told.")
    return notes
