"""The programs that load a server, in small: what is wrong must not escape them."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from client.bench.arrivals import poisson
from client.bench.datasets.prompts import PromptMaker
from client.bench.datasets.synthetic import random_lengths
from client.bench.figures import summarise
from client.bench.load import Asking, LoadThread, Sample
from client.bench.workload import History, Sampling, Session, Turn
from client.target import NoServer, Target, model_of, new_client
from perf.bench_serve import split
from perf.soak import Ledger, Reading, judge
from tests.server_process import ROOT, SOON_S, ServerProcess

AT_REST = {"requests": 0, "running": 0, "waiting": 0, "available_pages": 9, "total_pages": 9}
SAMPLING = Sampling(chat=False)


def plan(rate: float | None) -> list[Session]:
    made = random_lengths(PromptMaker(as_ids=True, vocab=200), 3, 12, (1, 30), (2, 9))
    return made if rate is None else poisson(made, (rate, rate), 3)


def output_of(sessions: list[Session]) -> int:
    return sum(turn.output_tokens for session in sessions for turn in session.turns)


def asking(server: ServerProcess, http2: bool = False, model: str = "tiny") -> Asking:
    return Asking(Target(server.url, model, http2), SAMPLING)


@pytest.mark.parametrize("http2", [False, True], ids=["HTTP/1.1", "HTTP/2"])
@pytest.mark.parametrize("rate", [None, 200.0], ids=["closed", "Poisson"])
def test_each_planned_request_is_answered(
    tiny: ServerProcess, http2: bool, rate: float | None
) -> None:
    load = LoadThread(asking(tiny, http2), plan(rate), None if rate else 4)
    thread = load.start(0.0)
    thread.join(SOON_S)
    assert load.failure is None and not thread.is_alive()
    figures = summarise(load.samples)
    assert figures["errors"] == {} and figures["requests"] == 12
    assert figures["output_tokens"] == output_of(plan(rate))
    assert figures["ttft_ms"]["p50"] > 0 and figures["wall_s"] > 0
    assert len({sample.text for sample in load.samples}) > 6


def test_turns_of_a_session_follow_each_other(tiny: ServerProcess) -> None:
    session = Session((Turn("Hello", 5), Turn("again", 6, pause_s=0.05), Turn("once more", 7)))
    load = LoadThread(Asking(Target(tiny.url, "tiny"), Sampling(chat=True)), [session], 1)
    load.start(0.0).join(SOON_S)
    assert [s.error for s in load.samples] == [None] * 3
    assert [s.output_tokens for s in load.samples] == [5, 6, 7]
    first, second, third = load.samples
    assert first.ended_s + 0.05 <= second.sent_s and second.ended_s <= third.sent_s
    assert first.prompt_tokens < second.prompt_tokens < third.prompt_tokens


def test_a_turn_that_fails_ends_its_session(tiny: ServerProcess) -> None:
    session = Session((Turn((1,), 2), Turn((10**6,), 2), Turn((1,), 2)))
    load = LoadThread(asking(tiny), [session, Session((Turn((5,), 3),))], 1)
    load.start(0.0).join(SOON_S)
    errors = [sample.error for sample in load.samples]
    assert errors[0] is None and errors[3] is None and len(errors) == 4
    assert errors[1] is not None and errors[1].startswith("400")
    assert errors[2] == "not sent: a turn before it failed"


def ask_once(asking: Asking, turn: Turn) -> Sample:
    async def main() -> Sample:
        async with new_client(asking.target) as client:
            history = History(Session((turn,)), asking.sampling, asking.target.model)
            return await asking.ask(client, history, turn, 0.0)

    return asyncio.run(main())


def test_a_refusal_is_an_error_of_its_request(tiny: ServerProcess) -> None:
    sample = ask_once(asking(tiny, model="nobody"), Turn((1, 2), 3))
    assert sample.error is not None and sample.error.startswith("404") and not sample.arrivals_s


def test_an_answer_that_takes_too_long_is_an_error(tiny: ServerProcess) -> None:
    patient = asking(tiny)
    hasty = Asking(patient.target, SAMPLING, timeout_s=0.3)
    sample = ask_once(hasty, Turn((1, 2, 3), 4000))
    assert sample.error is not None and sample.error.startswith("TimeoutError")
    tiny.wait_at_rest(SOON_S)


def test_a_stream_that_is_left_is_reset(tiny: ServerProcess) -> None:
    """The connection goes on, and the server stops working for nobody."""
    endless, asks = Turn((1, 2, 3), 4000), asking(tiny, http2=True)

    def history(turn: Turn) -> History:
        return History(Session((turn,)), SAMPLING, "tiny")

    async def main() -> None:
        async with new_client(asks.target) as client:
            for _ in range(5):
                path, body = history(endless).ask(endless)
                async with client.stream("POST", path, json=body) as response:
                    async for _ in response.aiter_raw():
                        break
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await asks.ask(client, history(endless), endless, 0.0)
            await asyncio.to_thread(tiny.wait_at_rest)
            long = Turn((137,) * 4000, 2)  # its body needs more than one frame
            assert (await asks.ask(client, history(long), long, 0.0)).error is None

    tiny.wait_at_rest(SOON_S)
    asyncio.run(asyncio.wait_for(main(), SOON_S))


def bench(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "runtime.cli", "bench", *arguments]
    return subprocess.run(command, cwd=ROOT, timeout=60, capture_output=True, text=True)


@pytest.mark.parametrize("http", ["1", "2"])
def test_bench_as_a_program(tiny: ServerProcess, tmp_path: Path, http: str) -> None:
    made = tmp_path / "result.json"
    done = bench(
        "--url", f"{tiny.url}/v1", "--http", http, "--requests", "8", "--vocab", "200",
        "--output-tokens", "2-5", "--threads", "2", "--ttft-ms", "9999", "--json", str(made),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    record = json.loads(made.read_text())
    figures = record["figures"]
    assert figures["requests"] == 8 and figures["errors"] == {} and figures["goodput_share"] == 1
    assert figures["finish_reasons"] == {"length": 8}
    # Of TTFT, not ITL: on a busy machine all tokens of an answer may come in one event.
    assert set(figures["ttft_ms"]) == {"mean", "p50", "p90", "p95", "p99"}
    assert len(record["requests"]) == 8 and record["server"]["model"] == "tiny"
    assert "goodput, requests/s" in done.stdout and "2 load threads, busy for" in done.stdout
    client = record["client"]
    assert client["threads"] == 2 and client["busy_share"] > 0 and client["lag_p99_ms"] >= 0


def test_bench_fails_where_a_request_fails(tiny: ServerProcess) -> None:
    asked = ["--url", tiny.url, "--requests", "3", "--model", "nobody"]
    warm = bench(*asked)
    assert warm.returncode == 1 and "nothing was timed" in warm.stderr
    cold = bench(*asked, "--warmup", "0")
    assert cold.returncode == 1 and "3 failed" in cold.stdout


def test_a_key_is_shown_nowhere(
    tiny: ServerProcess,
) -> None:
    assert model_of(tiny.url, "any") == "tiny"
    assert "secret" not in repr(Target(tiny.url, "tiny", key="secret"))
    with pytest.raises(NoServer, match="404"):
        model_of(f"{tiny.url}/nowhere")


def test_what_is_for_the_server() -> None:
    assert split(["--rate", "4", "--", "--model", "m"]) == (["--rate", "4"], ["--model", "m"])
    assert split(["--rate", "4"]) == (["--rate", "4"], [])


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
