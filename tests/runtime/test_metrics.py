"""GET /metrics of a whole server under a known load: every count is what the clients saw."""

import asyncio
import json
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.core import EngineStats
from engine.prefix_cache import HostCounts
from engine.request import Delta, Finish, SamplingParams
from httpd.traces import Traces
from runtime.live import Latency, Live, Load, Quantiles, Throughput, Tier
from runtime.metrics.scrape import Sources, exposition
from runtime.request_log import RequestLog
from tests.fakes_insight import H200
from tests.fakes_requests import started
from tests.server_process import SOON_S, ServerProcess, body, serving

DASHBOARD = Path(__file__).resolve().parents[2] / "deploy" / "grafana" / "plait.json"
# What dashboards and autoscalers made for vLLM look for.
VLLM_NAMES = (
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
    "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total",
    "vllm:num_preemptions_total", "vllm:prompt_tokens_total", "vllm:generation_tokens_total",
    "vllm:request_success_total", "vllm:request_prompt_tokens_bucket",
    "vllm:request_generation_tokens_bucket", "vllm:time_to_first_token_seconds_bucket",
    "vllm:inter_token_latency_seconds_bucket", "vllm:e2e_request_latency_seconds_bucket",
    "vllm:request_queue_time_seconds_bucket", "vllm:request_prefill_time_seconds_bucket",
    "vllm:request_decode_time_seconds_bucket", "vllm:request_params_max_tokens_bucket",
    "vllm:request_params_n_bucket", "vllm:request_time_per_output_token_seconds_bucket",
)  # fmt: skip
TOKENS = (1, 2, 5, 9, 20)


class Metrics:
    """One scrape, parsed by Prometheus' own client."""

    def __init__(self, text: str) -> None:
        self.samples = [
            sample for family in text_string_to_metric_families(text) for sample in family.samples
        ]
        self.names = {sample.name for sample in self.samples}

    def __call__(self, name: str, default: float | None = None, **labels: str) -> float:
        """The sum of all samples with these labels among theirs."""
        found = [
            sample.value
            for sample in self.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]
        assert found or default is not None, f"{name} {labels} is not served"
        return sum(found) if found else default or 0.0


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with serving() as running:
        yield running.ready()
        running.end_clean()


def scrape(server: ServerProcess) -> Metrics:
    server.wait_at_rest(SOON_S)
    time.sleep(0.15)  # the engine tells every tenth of a second
    response = server.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    return Metrics(response.text)


async def load(server: ServerProcess) -> list[tuple[float, float, int]]:
    """(time to first chunk, whole time, tokens) of each request, as its client saw them."""
    async with httpx.AsyncClient(timeout=SOON_S) as client:

        async def one(tokens: int) -> tuple[float, float, int]:
            asked = body("hello", stream=True, max_tokens=tokens)
            begun_s, first_s, chunks = time.monotonic(), None, 0
            async with client.stream("POST", f"{server.url}/v1/completions", json=asked) as answer:
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        first_s = first_s or time.monotonic()
                        chunks += 1
            assert first_s is not None and chunks >= 1
            return first_s - begun_s, time.monotonic() - begun_s, tokens

        return list(await asyncio.gather(*(one(tokens) for tokens in TOKENS * 4)))


def test_counts_are_what_clients_saw(server: ServerProcess) -> None:
    before = scrape(server)
    seen = asyncio.run(load(server))
    assert server.ask("x" * 5000).status_code == 400  # too long
    assert server.post("/v1/completions", {"model": "no"}).status_code in (400, 404)
    assert server.get("/nowhere").status_code == 404
    after = scrape(server)

    def grew(name: str, **labels: str) -> float:
        return after(name, **labels) - before(name, 0.0, **labels)

    tokens = sum(TOKENS) * 4
    assert grew("plait_output_tokens_total") == grew("vllm:generation_tokens_total") == tokens
    assert grew("plait_prompt_tokens_total") == len(seen) * len("hello")
    for name in ("time_to_first_token", "request", "request_queue", "request_prefill"):
        assert grew(f"plait_{name}_seconds_count") == len(seen), name
    assert grew("plait_inter_token_latency_seconds_count") == tokens - len(seen)
    assert grew("plait_request_output_tokens_sum") == tokens
    assert grew("plait_requests_finished_total", reason="length") == len(seen)
    assert grew("vllm:request_success_total", finished_reason="length") == len(seen)
    assert after("plait_requests_refused_total", code="context_length_exceeded") == 1
    assert after("plait_requests_refused_total", code="unknown_url") == 1
    assert grew("plait_http_responses_total", path="/v1/completions", status="200") == len(seen)
    assert after("plait_requests_alive") == after("plait_requests_running") == 0
    # Times: the sum of phases is the whole, which no client saw shorter than the server.
    parts = sum(grew(f"plait_request_{part}_seconds_sum") for part in
                ("queue", "prefill", "decode", "front_end"))  # fmt: skip
    whole = grew("plait_request_seconds_sum")
    assert parts == pytest.approx(whole, rel=1e-6)
    assert 0 < whole <= sum(each for _, each, _ in seen)
    assert 0 < grew("plait_time_to_first_token_seconds_sum") <= sum(each for each, _, _ in seen)


def test_buckets_add_up(server: ServerProcess) -> None:
    told = scrape(server)
    for sample in told.samples:
        if sample.name.endswith("_bucket") and sample.labels["le"] == "+Inf":
            rest = {name: value for name, value in sample.labels.items() if name != "le"}
            assert told(sample.name.removesuffix("_bucket") + "_count", **rest) == sample.value


def test_names_that_vllm_has(server: ServerProcess) -> None:
    server.ask("hello")
    told = scrape(server)
    assert set(VLLM_NAMES) <= told.names
    assert {sample.labels["model_name"] for sample in told.samples if "vllm" in sample.name} == {
        "fake"
    }


def panels(node: Any) -> Iterator[str]:
    """Every query of a dashboard."""
    if isinstance(node, list):
        node = dict(enumerate(node))
    if isinstance(node, dict):
        if isinstance(node.get("expr"), str):
            yield node["expr"]
        for inner in node.values():
            yield from panels(inner)


def test_the_dashboard_asks_for_names_that_are_served(server: ServerProcess) -> None:
    server.ask("hello")
    # Without a GPU there is no name of theirs: those are looked up in the source's own list.
    served = scrape(server).names | set(re.findall(r"plait_gpu_\w+", exposition_with_a_gpu()))
    queries = list(panels(json.loads(DASHBOARD.read_text())))
    assert len(queries) > 15
    for query in queries:
        named = set(re.findall(r"plait_\w+", query))
        assert named, query
        assert named <= served, f"{query}: {named - served}"


def test_live_and_timeline(server: ServerProcess) -> None:
    answer = httpx.post(
        f"{server.url}/v1/completions", json=body("hello"), headers={"x-request-id": "look-me-up"}
    ).json()
    for either in ("look-me-up", answer["id"]):
        told = server.get(f"/debug/requests/{either}").json()
        assert told["response_id"] == answer["id"] and told["status"] == 200
        (part,) = told["parts"]
        names = ("submitted", "encoded", "queued", "begun", "first_token", "last_token", "sent")
        times = [part[f"{name}_s"] for name in names]
        assert times == sorted(times) and 0 < times[0] and times[-1] <= told["ended_s"]
        assert part["finish"] == "length" and part["output_tokens"] == 8
    assert server.get("/debug/requests/nobody").status_code == 404
    live = server.get("/live").json()
    assert live["state"] == "ready" and live["model"] == "fake" and live["requests"] == []
    assert live["latency"]["ttft"]["count"] > 0
    assert server.get("/capacity").json()["host"]["cpus"] > 0


# A scrape on its own


def sources(log: RequestLog, stats: EngineStats | None = None) -> Sources:
    depths = {"deltas": 3}
    return Sources(log.tally, Traces(), lambda: stats, lambda: depths, lambda: {"version": "0"})


def live_now() -> Live:
    nothing = Quantiles(0, None, None, None, None)
    return Live(
        at_s=0.0, uptime_s=1.0, state="ready", version="0", gil_enabled=False, model='a"b\\',
        window_s=10.0, throughput=Throughput(0, 0, 0, 0),
        latency=Latency(nothing, nothing, nothing, nothing),
        load=Load(1000, 0, 0, 1000, 1024, 3072, 0, 0.0), kv=None, host_kv=None, steps=None,
        gpus=(H200,), memory_available_bytes=None, warnings=(), requests=(),
    )  # fmt: skip


def exposition_with_a_gpu() -> str:
    return exposition(sources(RequestLog()), live_now()).decode()


def test_labels_are_escaped_and_gpus_told() -> None:
    told = Metrics(exposition_with_a_gpu())
    assert told("vllm:num_requests_running", model_name='a"b\\') == 1000
    assert told("plait_gpu_power_watts", gpu="0") == 512.5
    assert told("plait_gpu_throttled", gpu="0") == 1
    assert told("plait_ring_depth", ring="deltas") == 3


def test_both_tiers_of_the_cache_are_told() -> None:
    log = RequestLog()
    log.open((1,), (SamplingParams(max_new_tokens=9),), None, 0.0)
    log.start(started(1, 500, 0.0, 0.0))
    log.take([Delta(1, "x", (1,), Finish.NONE, 1, 320, host_tokens=64)], 1.0, 1.0)
    live = replace(live_now(), kv=Tier(1000, 400, 300, 300), host_kv=Tier(8000, 0, 2000, 6000))
    told = Metrics(exposition(sources(log), live).decode())
    assert told("plait_kv_tokens", tier="device", state="cached") == 300
    assert told("plait_kv_tokens", tier="host", state="cached") == 2000
    assert told("plait_kv_tokens", tier="host") == 8000
    assert told("plait_prefix_cache_hit_tokens_total", tier="device") == 256
    assert told("plait_prefix_cache_hit_tokens_total", tier="host") == 64
    assert told("vllm:prefix_cache_hits_total") == 320


def test_copies_between_the_tiers_are_told_in_tokens() -> None:
    stats = EngineStats(
        running=0, waiting=0, free_pages=50, cached_pages=50, evictable_pages=50, total_pages=100,
        page_size=16, steps=1, retractions=0, host_s=0.0,
        host=HostCounts(cached=40, capacity=400, written=60, loaded=7),
    )  # fmt: skip
    told, plain = (
        Metrics(exposition(sources(RequestLog(), each), live_now()).decode())
        for each in (stats, replace(stats, host=HostCounts()))
    )
    name = "plait_host_cache_copied_tokens_total"
    assert told(name, direction="out") == 60 * 16
    assert told(name, direction="in") == 7 * 16
    assert name not in plain.names  # there is no such tier


def test_a_scrape_takes_no_longer_with_many_requests() -> None:
    """What is counted does not grow with who runs: 1,000 requests cost what none do."""
    log = RequestLog()
    params = (SamplingParams(max_new_tokens=9),)
    for number in range(1000):
        log.open((number,), params, None, 0.0)
        log.start(started(number, 5, 0.0, 0.0))
    log.take([Delta(n, "x", (1,), Finish.NONE, 1, 0) for n in range(1000)], 1.0, 1.0)
    empty, full = (exposition(sources(each), live_now()) for each in (RequestLog(), log))
    assert len(full.splitlines()) == len(empty.splitlines())
