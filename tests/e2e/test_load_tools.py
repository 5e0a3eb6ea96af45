"""The programs that load a server, in small: what is wrong must not escape them."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from perf.bench_serve import Range, summarise
from perf.load import LoadThread, Planned, Sample, Target, ask, body_of, make_plan, new_client
from perf.soak import Ledger, Reading, judge
from tests.server_process import ROOT, SOON_S, ServerProcess

AT_REST = {"requests": 0, "running": 0, "waiting": 0, "available_pages": 9, "total_pages": 9}


def plan(rate: float | None) -> list[Planned]:
    return make_plan(
        3, 12, vocab=200, input_tokens=(1, 30), output_tokens=(2, 9), rate=rate
    )  # fmt: skip


def test_a_seed_gives_one_plan() -> None:
    assert plan(None) == plan(None)
    times = [p.at_s for p in plan(5.0) if p.at_s is not None]
    assert len(times) == 12 and times == sorted(times) and times[0] > 0


@pytest.mark.parametrize("http2", [False, True], ids=["HTTP/1.1", "HTTP/2"])
@pytest.mark.parametrize("rate", [None, 200.0], ids=["closed", "Poisson"])
def test_each_planned_request_is_answered(
    tiny: ServerProcess, http2: bool, rate: float | None
) -> None:
    load = LoadThread(Target(tiny.url, "tiny", http2), plan(rate), None if rate else 4)
    load.start(0.0).join(SOON_S)
    assert load.failure is None
    figures = summarise(load.samples)
    assert figures["errors"] == {} and figures["requests"] == 12
    assert figures["output_tokens"] == sum(p.output_tokens for p in plan(rate))
    assert figures["ttft_ms"]["p50"] > 0 and figures["wall_s"] > 0
    texts = {s.planned.prompt_ids: s.text for s in load.samples}
    assert len(texts) == 12 and len(set(texts.values())) > 6


def test_a_refusal_is_an_error_of_its_request(tiny: ServerProcess) -> None:
    async def main() -> Sample:
        target = Target(tiny.url, "nobody", http2=False)
        async with new_client(target) as client:
            return await ask(client, target, plan(None)[0], 0.0)

    sample = asyncio.run(main())
    assert sample.error is not None and "404" in sample.error and sample.arrivals_s == ()


def test_a_stream_that_is_left_is_reset(tiny: ServerProcess) -> None:
    """The connection goes on, and the server stops working for nobody."""
    endless = Planned((1, 2, 3), 4000)

    async def main() -> None:
        target = Target(tiny.url, "tiny", http2=True)
        async with new_client(target) as client:
            for _ in range(5):
                body = body_of(target, endless)
                async with client.stream("POST", "/v1/completions", json=body) as response:
                    async for _ in response.aiter_raw():
                        break
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await ask(client, target, endless, 0.0)
            await asyncio.to_thread(tiny.wait_at_rest)
            long = Planned((137,) * 4000, 2)  # its body needs more than one frame
            assert (await ask(client, target, long, 0.0)).error is None

    tiny.wait_at_rest(SOON_S)
    asyncio.run(asyncio.wait_for(main(), SOON_S))


def test_bench_serve_as_a_program(tiny: ServerProcess) -> None:
    name = "bench_serve_of_a_test"
    made = ROOT / "perf" / "results" / f"{name}.json"
    command = [sys.executable, "-m", "perf.bench_serve", "--url", tiny.url, "--http", "2"]
    command += ["--requests", "8", "--vocab", "200", "--output-tokens", "2-5", "--name", name]
    try:
        subprocess.run(command, cwd=ROOT, check=True, timeout=SOON_S, capture_output=True)
        figures = json.loads(made.read_text())["figures"]
    finally:
        made.unlink(missing_ok=True)
    assert figures["requests"] == 8 and figures["errors"] == {}
    assert set(figures["itl_ms"]) == {"p50", "p90", "p99"}


@pytest.mark.parametrize(("text", "found"), [("7", (7, 7)), ("1-20", (1, 20))])
def test_ranges(text: str, found: tuple[int, int]) -> None:
    assert Range().convert(text, None, None) == found


def readings(last_mb: float) -> list[Reading]:
    sizes = [100.0, 120.0, 120.0, last_mb]
    return [Reading(0.0, size, 9, 9, AT_REST) for size in sizes for _ in range(5)]


def test_the_verdict_of_a_soak() -> None:
    good = Ledger(readings=readings(121.0), rest_s=0.5)
    assert judge(good, "INFO all is well") == []
    assert "memory grew" in judge(Ledger(readings=readings(130.0), rest_s=0.5), "")[0]
    assert "not at rest" in judge(Ledger(readings=readings(121.0)), "")[0]
    told_wrong = Ledger(readings=readings(121.0), rest_s=0.5, errors=["a wrong word"])
    assert "a wrong word" in judge(told_wrong, "")[0]
    assert "ERROR oh" in judge(good, "INFO\n12:00 ERROR oh\n")[0]


@pytest.mark.slow
def test_a_short_soak(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "perf.soak", "--seconds", "20", "--streams", "50"]
    command += ["--name", "soak_of_a_test"]
    made = ROOT / "perf" / "results" / "soak_of_a_test.json"
    try:
        subprocess.run(command, cwd=ROOT, check=True, timeout=240, capture_output=True)
        assert json.loads(made.read_text())["figures"]["wrong"] == []
    finally:
        made.unlink(missing_ok=True)
