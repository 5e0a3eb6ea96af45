"""All metrics of a server at one moment, in Prometheus' text format.

Reads what other threads count, without a lock: a value may be a moment old, the engine's up to a
tenth of a second. Made by prometheus-client, over a collector that holds nothing itself.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from engine.core import EngineStats
from engine.step_counters import STEP_BOUNDS_S
from httpd.service import State
from httpd.traces import Traces
from runtime.capacity.warn import CODES
from runtime.live import Live
from runtime.metrics.families import Families
from runtime.metrics.histogram import Histogram
from runtime.metrics.tally import Tally
from runtime.metrics.thread_times import thread_seconds


@dataclass(frozen=True, slots=True)
class Sources:
    """Where a scrape looks. Each value is read whole; nothing here is written."""

    tally: Tally
    traces: Traces
    stats: Callable[[], EngineStats | None]
    ring_depths: Callable[[], Mapping[str, int]]
    facts: Callable[[], Mapping[str, str]]  # what never changes once the model is loaded


class _Once(Collector):
    """Families that were gathered already. Owned by the thread that scrapes."""

    def __init__(self, families: Families) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def exposition(sources: Sources, live: Live) -> bytes:
    """The whole answer to GET /metrics. Safe from any thread.

    live  as of this moment; only its quantiles and single requests are not looked at
    """
    families = Families(live.model)
    _server(families, sources, live)
    _load(families, live)
    _requests(families, sources.tally)
    _latencies(families, sources.tally)
    _endings(families, sources.tally, sources.traces)
    stats = sources.stats()
    if stats is not None:
        _engine(families, stats, live)
    _gpus(families, live)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Once(families))
    return generate_latest(registry)


def _server(to: Families, sources: Sources, live: Live) -> None:
    to.info("build", "What is served, and how.", sources.facts())
    to.gauges(
        "state", "1 for the server's state, 0 for the others.",
        [({"state": each.value}, float(each.value == live.state)) for each in State],
    )  # fmt: skip
    to.gauge("uptime_seconds", "Since the process began.", live.uptime_s)
    to.gauge("gil_enabled", "1 where all threads share one core.", float(live.gil_enabled))
    to.gauges(
        "ring_depth", "Items on their way between two threads.",
        [({"ring": name}, depth) for name, depth in sources.ring_depths().items()],
    )  # fmt: skip
    to.counters(
        "thread_cpu_seconds", "Processor time; a thread that gets 1 a second can do no more.",
        [({"thread": name}, seconds) for name, seconds in thread_seconds().items()],
    )  # fmt: skip
    warned = {each.code for each in live.warnings}
    to.gauges(
        "warning", "1 while it lasts: what will cost speed or requests.",
        [({"code": code}, float(code in warned)) for code in CODES],
    )  # fmt: skip
    to.gauge("host_memory_available_bytes", "Of this machine.", live.memory_available_bytes)


def _load(to: Families, live: Live) -> None:
    load = live.load
    to.gauge("requests_alive", "Accepted and not over.", load.alive)
    to.gauge("requests_encoding", "At a tokenizer thread.", load.encoding)
    to.gauge(
        "requests_waiting", "For a row.", load.waiting, vllm="num_requests_waiting"
    )  # fmt: skip
    to.gauge(
        "requests_running", "That hold a row and pages.", load.running,
        vllm="num_requests_running",
    )  # fmt: skip
    to.gauge("waiting_prompt_tokens", "Of requests without a token.", load.waiting_tokens)
    to.gauge(
        "start_estimate_seconds", "Until a request that came now would start.",
        load.start_estimate_s,
    )  # fmt: skip
    if live.kv is not None:
        kv = live.kv
        used = kv.used_tokens / kv.total_tokens if kv.total_tokens else 0.0
        to.gauge(
            "kv_used_ratio", "Share of the KV pool that running requests hold.", used,
            vllm="kv_cache_usage_perc",
        )  # fmt: skip
        tiers = {"device": kv} if live.host_kv is None else {"device": kv, "host": live.host_kv}
        to.gauges(
            "kv_tokens", "Tokens in each tier of the cache of keys and values, by what holds them.",
            [
                ({"tier": name, "state": state}, tokens)
                for name, tier in tiers.items()
                for state, tokens in (
                    ("used", tier.used_tokens), ("cached", tier.cached_tokens),
                    ("free", tier.free_tokens),
                )
            ],
        )  # fmt: skip


def _requests(to: Families, tally: Tally) -> None:
    to.counter(
        "prompt_tokens", "Of requests that got their first token.", tally.prompt_tokens,
        vllm="prompt_tokens",
    )  # fmt: skip
    to.counter(
        "output_tokens", "Sent to clients.", tally.output_tokens, vllm="generation_tokens"
    )  # fmt: skip
    to.counter(
        "prefix_cache_queried_tokens", "Prompt tokens looked for in the prefix cache.",
        tally.prompt_tokens, vllm="prefix_cache_queries",
    )  # fmt: skip
    to.counters(
        "prefix_cache_hit_tokens", "Prompt tokens found in the prefix cache.",
        [
            ({"tier": "device"}, tally.cached_tokens - tally.host_tokens),
            ({"tier": "host"}, tally.host_tokens),
        ],
    )  # fmt: skip
    to.theirs_counter(
        "prefix_cache_hits", "Prompt tokens found in the prefix cache.", tally.cached_tokens
    )
    to.histogram(
        "request_prompt_tokens", "Of requests that ended.", tally.prompt_sizes,
        vllm="request_prompt_tokens",
    )  # fmt: skip
    to.histogram(
        "request_output_tokens", "Of requests that ended.", tally.output_sizes,
        vllm="request_generation_tokens",
    )  # fmt: skip
    to.histogram(
        "request_max_tokens", "What requests allowed.", tally.max_tokens,
        vllm="request_params_max_tokens",
    )  # fmt: skip
    to.histogram(
        "request_choices", "Generations that share a prompt.", tally.choices,
        vllm="request_params_n",
    )  # fmt: skip


def _latencies(to: Families, tally: Tally) -> None:
    to.histogram(
        "time_to_first_token_seconds", "From a request's arrival to its first token.", tally.ttft,
        vllm="time_to_first_token_seconds",
    )  # fmt: skip
    to.histogram(
        "inter_token_latency_seconds", "Between two tokens of a request.", tally.itl,
        vllm="inter_token_latency_seconds",
    )  # fmt: skip
    to.histogram(
        "request_time_per_output_token_seconds", "Mean of a request, without its first token.",
        tally.token_time, vllm="request_time_per_output_token_seconds",
    )  # fmt: skip
    to.histogram(
        "request_seconds", "From arrival to last token.", tally.e2e,
        vllm="e2e_request_latency_seconds",
    )  # fmt: skip
    to.histogram(
        "request_queue_seconds", "In the engine, before it had a row.", tally.queue,
        vllm="request_queue_time_seconds",
    )  # fmt: skip
    to.histogram(
        "request_prefill_seconds", "From its row to its first token.", tally.prefill,
        vllm="request_prefill_time_seconds",
    )  # fmt: skip
    to.histogram(
        "request_decode_seconds", "From its first token to its last.", tally.decode,
        vllm="request_decode_time_seconds",
    )  # fmt: skip
    to.histogram(
        "request_front_end_seconds", "Outside of the engine: HTTP, text and threads.",
        tally.front_end,
    )  # fmt: skip


def _endings(to: Families, tally: Tally, traces: Traces) -> None:
    finished = dict(tally.finished)
    to.counters(
        "requests_finished", "By why they ended.",
        [({"reason": reason}, count) for reason, count in finished.items()],
    )  # fmt: skip
    to.theirs_counters(
        "request_success", "By why they ended.",
        [({"finished_reason": reason}, count) for reason, count in finished.items()],
    )  # fmt: skip
    to.counters(
        "requests_refused", "By the code in the error body.",
        [({"code": code}, count) for code, count in dict(traces.refusals).items()],
    )  # fmt: skip
    to.counters(
        "http_responses", "By path and status; 499 where the client left before it began.",
        [
            ({"path": path, "status": str(status)}, count)
            for (path, status), count in dict(traces.responses).items()
        ],
    )  # fmt: skip


def _engine(to: Families, stats: EngineStats, live: Live) -> None:
    counts = stats.counts
    steps = Histogram(STEP_BOUNDS_S)
    steps.counts, steps.total = list(counts.by_duration), counts.busy_s
    to.histogram("step_seconds", "What a step takes on the device.", steps)
    to.counter("step_host_seconds", "Planning and committing steps.", stats.host_s)
    to.counter("steps", "Launched.", stats.steps)
    to.counter("prefill_tokens", "Prompt tokens computed.", counts.prefill_tokens)
    to.counter("sampled_tokens", "Drawn, those of ended requests included.", counts.sampled_tokens)
    to.counter(
        "retractions", "Running requests sent back for their pages.", stats.retractions,
        vllm="num_preemptions",
    )  # fmt: skip
    if stats.host.capacity:
        to.counters(
            "host_cache_copied_tokens", "Between the prefix cache's tiers; out: to the host's.",
            [
                ({"direction": "out"}, stats.host.written * stats.page_size),
                ({"direction": "in"}, stats.host.loaded * stats.page_size),
            ],
        )  # fmt: skip
    idle = None if live.steps is None else live.steps.idle_share
    to.gauge("device_idle_ratio", "Of the last seconds without a step under way.", idle)


def _gpus(to: Families, live: Live) -> None:
    if not live.gpus:
        return
    named = [({"gpu": str(gpu.index)}, gpu.activity) for gpu in live.gpus]
    kinds = (
        ("gpu_power_watts", "Drawn now.", lambda a: a.power_w),
        ("gpu_power_limit_watts", "Allowed.", lambda a: a.power_limit_w),
        ("gpu_temperature_celsius", "Of the GPU.", lambda a: a.temperature_c),
        ("gpu_sm_clock_megahertz", "Now.", lambda a: a.sm_mhz),
        ("gpu_busy_ratio", "Of time with any kernel running.", lambda a: a.busy_share),
        ("gpu_memory_used_bytes", "By all programs.", lambda a: a.memory and a.memory.used_bytes),
        ("gpu_memory_total_bytes", "There is.", lambda a: a.memory and a.memory.total_bytes),
        ("gpu_ecc_corrected_errors", "Since its driver came.", lambda a: a.ecc and a.ecc.corrected),
        ("gpu_ecc_uncorrected_errors", "Likewise.", lambda a: a.ecc and a.ecc.uncorrected),
        (
            "gpu_throttled", "1 while something slows it down.",
            lambda a: None if a.throttled_by is None else float(bool(a.throttled_by)),
        ),
    )  # fmt: skip
    for name, help, of in kinds:
        told = [(labels, of(activity)) for labels, activity in named]
        to.gauges(name, help, [(labels, value) for labels, value in told if value is not None])
