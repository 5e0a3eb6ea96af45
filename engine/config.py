"""What an engine is told once, before it is built. "auto" is resolved while building."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from engine.graph_sizes import MOST_ROWS

Dtype = Literal["auto", "float32", "float16", "bfloat16"]
LoadFormat = Literal["auto", "dummy"]

PREFILL_ATTENTIONS: Final = ("auto", "torch", "flashinfer")
# Orders in which waiting requests start: engine/policies.py says what each means.
SCHEDULE_POLICIES: Final = (
    "fcfs", "short-first", "lpm", "dfs-weight", "lof", "random", "routing-key", "priority",
)  # fmt: skip

_DEVICE: Final = re.compile(r"auto|cpu|cuda(:[0-9]{1,3})?")

# Fluent to read, 25 tokens a second. Steps without prompts take less on a GPU that fits the model.
TARGET_ITL_MS: Final = 40.0


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Engine settings; validated in `__post_init__`, never edited afterwards.

    Raises ValueError naming the field, its value and the limit.
    """

    model: Path
    device: str = "auto"  # "auto", "cpu", "cuda" or "cuda:N"
    dtype: Dtype = "auto"
    load_format: LoadFormat = "auto"
    page_size: int = 64  # tokens a KV page holds
    max_running: int = 256  # rows: requests that hold pages at the same time
    max_model_len: int | None = None  # prompt + output, tokens; None: the checkpoint's own
    prefill_budget: int | None = 2048  # prefill tokens a step; None: one whole context
    max_kv_tokens: int | None = None  # None: from memory_fraction
    memory_fraction: float = 0.85  # of what is free after the weights are loaded
    cache: Literal["radix", "naive"] = "radix"
    cache_eviction: Literal["lru", "lfu", "fifo"] = "lru"
    host_cache_gib: float = 0.0  # memory for pages that leave the device; 0: they are forgotten
    host_cache_write: Literal["through", "back"] = "through"  # when they are copied there
    overlap: bool | None = None  # plan a step while one runs; None: on where launching is async
    cuda_graph_max_rows: int = MOST_ROWS  # decode steps of up to so many are graphs; 0: none are
    prefill_attention: Literal["auto", "torch", "flashinfer"] = "auto"  # of CUDA devices
    cpu_threads: int | None = None  # torch's intra-op threads; None: every core (see DESIGN.md)
    seed: int = 0  # of dummy weights, and of a random order
    schedule_policy: str = "fcfs"
    preemption_threshold: int | None = None  # levels of priority; None: no request takes another's
    target_itl_ms: float | None = None  # of a step; 0: any; None: TARGET_ITL_MS on CUDA, else any
    trace_steps: int = 0  # of the last steps, why each was so: see engine/step_trace.py
    queue_timeout_s: float | None = None  # a request's age before it starts; None: any
    running_timeout_s: float | None = None  # its age once it has started; None: any

    def __post_init__(self) -> None:
        self._within("page_size", self.page_size, 1, 256)
        self._within("max_running", self.max_running, 1, 65_536)
        self._within("cuda_graph_max_rows", self.cuda_graph_max_rows, 0, 65_536)
        for name in ("max_model_len", "prefill_budget", "max_kv_tokens", "cpu_threads"):
            value = getattr(self, name)
            if value is not None:
                self._within(name, value, 1, 2**31 - 1)
        if not 0.0 < self.memory_fraction <= 1.0:
            raise ValueError(f"memory_fraction is {self.memory_fraction}; it must be in (0, 1]")
        if self.prefill_attention not in PREFILL_ATTENTIONS:
            raise ValueError(
                f"prefill_attention is {self.prefill_attention!r}; it must be one of "
                f"{', '.join(PREFILL_ATTENTIONS)}"
            )
        if self.cache not in ("radix", "naive"):
            raise ValueError(f"cache is {self.cache!r}; it must be radix or naive")
        if self.cache_eviction not in ("lru", "lfu", "fifo"):
            raise ValueError(
                f"cache_eviction is {self.cache_eviction!r}; it must be lru, lfu or fifo"
            )
        if self.host_cache_write not in ("through", "back"):
            raise ValueError(
                f"host_cache_write is {self.host_cache_write!r}; it must be through or back"
            )
        self._within("host_cache_gib", self.host_cache_gib, 0, 65_536)
        if self.host_cache_gib and self.cache != "radix":
            raise ValueError(
                f"host_cache_gib is {self.host_cache_gib}, but cache is {self.cache}, which keeps "
                "nothing"
            )
        if self.schedule_policy not in SCHEDULE_POLICIES:
            raise ValueError(
                f"schedule_policy is {self.schedule_policy!r}; it must be one of "
                f"{', '.join(SCHEDULE_POLICIES)}"
            )
        self._within("trace_steps", self.trace_steps, 0, 100_000)
        if self.target_itl_ms:
            self._within("target_itl_ms", self.target_itl_ms, 1, 60_000)
        for name in ("queue_timeout_s", "running_timeout_s"):
            if getattr(self, name) is not None:
                self._within(name, getattr(self, name), 0.1, 604_800)
        if self.preemption_threshold is not None:
            self._within("preemption_threshold", self.preemption_threshold, 1, 1000)
            if self.schedule_policy != "priority":
                raise ValueError(
                    f"preemption_threshold is {self.preemption_threshold}, which only a "
                    f"schedule_policy of priority looks at; it is {self.schedule_policy}"
                )
        if not _DEVICE.fullmatch(self.device):
            raise ValueError(f"device is {self.device!r}; it must be auto, cpu, cuda or cuda:N")
        if self.dtype not in ("auto", "float32", "float16", "bfloat16"):
            raise ValueError(
                f"dtype is {self.dtype!r}; it must be auto, float32, float16 or bfloat16"
            )
        if self.load_format not in ("auto", "dummy"):
            raise ValueError(f"load_format is {self.load_format!r}; it must be auto or dummy")

    @staticmethod
    def _within(name: str, value: float, low: float, high: float) -> None:
        if not low <= value <= high:
            raise ValueError(f"{name} is {value}; it must be between {low} and {high}")
