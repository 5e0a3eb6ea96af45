"""What is measured of a server, judged and shown; and how flags go together. No server here."""

import dataclasses
import io
import time
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from client.bench.figures import summarise
from client.bench.load import Sample
from client.bench.runner import Pace, Ran
from client.bench.strain import Strain
from client.target import Target
from runtime.capacity.command import capacity
from runtime.capacity.measure import Measured, Plan, Trial, Workload, judged, measure
from runtime.capacity.measure_command import WorkloadsType, table_of
from runtime.capacity.search import Status

PLAN = Plan((Workload(10, 4),), ttft_s=1.0, itl_ms=100.0)


def figures(ttft_s: float, itl_s: float, error: str | None = None) -> dict[str, Any]:
    arrivals = tuple(ttft_s + itl_s * index for index in range(4))
    good = Sample(0.0, arrivals[-1], arrivals, 10, 4, 0, "abcd", "length")
    return summarise([good, Sample(0.0, 1.0, error=error)] if error else [good])


@pytest.mark.parametrize(
    ("ttft_s", "itl_s", "error", "kept"),
    [
        (0.99, 0.099, None, True),
        (1.01, 0.099, None, False),
        (0.99, 0.101, None, False),
        (0.99, 0.099, "503: later", False),
    ],
)
def test_a_trial_is_judged(ttft_s: float, itl_s: float, error: str | None, kept: bool) -> None:
    trial = judged(7, figures(ttft_s, itl_s, error), PLAN)
    assert (trial.users, trial.kept, trial.failed) == (7, kept, error is not None)
    assert trial.ttft_p99_ms == pytest.approx(ttft_s * 1e3)
    assert trial.itl_p50_ms == pytest.approx(itl_s * 1e3)


def test_a_lone_token_has_no_time_between() -> None:
    lone = summarise([Sample(0.0, 0.5, (0.4,), 10, 1, 0, "a", "length")])
    assert judged(1, lone, PLAN).kept
    nothing = summarise([Sample(0.0, 0.5, error="TimeoutError: ")])
    assert not judged(1, nothing, PLAN).kept and judged(1, nothing, PLAN).ttft_p99_ms is None


def test_a_late_client_misses_nothing() -> None:
    """What was kept in spite of it was kept; the JSON has both figures in either case."""
    late, well = Strain(1, 0.95, 3.0), Strain(2, 0.3, 3.0)
    missed = figures(1.01, 0.099)
    assert judged(7, missed, PLAN, late).is_spoilt and not judged(7, missed, PLAN, late).kept
    assert not judged(7, missed, PLAN, well).is_spoilt
    slow = Strain(1, 0.3, 60.0)
    assert judged(7, missed, PLAN, slow).is_spoilt, "by less than the client's lag"
    assert judged(7, figures(0.99, 0.159), PLAN, slow).is_spoilt
    assert not judged(7, figures(1.25, 0.099), PLAN, slow).is_spoilt, "by more"
    assert not judged(7, figures(0.99, 0.161), PLAN, slow).is_spoilt
    kept = judged(7, figures(0.99, 0.099), PLAN, late)
    assert kept.kept and not kept.is_spoilt
    assert dataclasses.asdict(kept)["client"]["busy_share"] == 0.95


def shown(*found: Measured) -> str:
    console = Console(file=io.StringIO(), width=160)
    console.print(table_of(list(found), PLAN, Target("http://x", "m")))
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def test_the_table_says_what_was_found() -> None:
    kept = Trial(8, True, 900.0, 40.0, 321.0, 32, 0, 9.0)
    missed = Trial(9, False, None, None, 0.0, 36, 36, 9.0)
    text = shown(
        Measured(10, 4, Status.FOUND, 8, 9, None, (kept, missed, missed)),
        Measured(11, 4, Status.MOST, 8, None, "no more were tried", (kept,)),
        Measured(12, 4, Status.TIME, 8, 9, "time was up", (kept, missed)),
        Measured(13, 4, Status.CONTEXT, 0, None, "the context has 16 tokens", ()),
        Measured(14, 4, Status.FAILED, 0, None, "400: [no]", ()),
        Measured(15, 4, Status.CLIENT, 8, 9, "the load itself was late", (kept, missed)),
    )
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines()[4:-1]]
    assert rows == [
        ["10", "4", "8", "900.0", "40.0", "321.0", "missed with 9"],
        ["11", "4", "≥ 8", "900.0", "40.0", "321.0", "no more were tried"],
        ["12", "4", "≥ 8", "900.0", "40.0", "321.0", "time was up, missed with 9"],
        ["13", "4", "–", "", "", "", "the context has 16 tokens"],
        ["14", "4", "–", "", "", "", "400: [no]"],
        ["15", "4", "≥ 8", "900.0", "40.0", "321.0", "the load itself was late, missed with 9"],
    ]


def test_missed_by_one_user_shows_by_how_much() -> None:
    trial = Trial(1, False, 3000.0, 40.0, 5.0, 4, 0, 9.0)
    told = Measured(10, 4, Status.NONE, 0, 1, "missed with a single user", (trial, trial))
    assert told.at_users is trial
    assert "3,000.0" in shown(told) and "missed with a single user" in shown(told)


def test_a_crowd_that_is_refused_has_missed_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a queue that is full: what fewer got was kept."""
    good = Sample(0.0, 0.4, (0.1, 0.2, 0.3, 0.4), 10, 4, 0, "abcd", "length")
    full = Sample(0.0, 0.1, error="503: the queue is full")

    def load(_asking: object, sessions: list[object], pace: Pace, *_: object, **__: object) -> Any:
        users = pace.concurrency or 0
        return Ran([good if users <= 3 else full for _ in sessions], Strain(1, 0.1, 1.0))

    (found,) = measured_with(load, {}, monkeypatch)
    assert (found.status, found.users, found.missed_at) == (Status.FOUND, 3, 4)


def measured_with(
    load: object, told: object, monkeypatch: pytest.MonkeyPatch, plan: Plan = PLAN
) -> list[Measured]:
    """told  what the server answers to every GET"""
    monkeypatch.setattr("runtime.capacity.measure.run_load", load)
    monkeypatch.setattr("runtime.capacity.measure.ask_json", lambda *_: told)
    return measure(Target("http://x", "m"), plan, Console(file=io.StringIO()))


@pytest.mark.parametrize(
    ("told", "first"),
    [
        ({"kv": {"total_tokens": 1400}, "load": {"max_running": 256}}, 25),
        ({"kv": {"total_tokens": 14000}, "load": {"max_running": 64}}, 16),
        ({"kv": {"total_tokens": 13}, "load": {"max_running": 64}}, 1),
        ({"kv": None}, 1),
        ([], 1),
    ],
)
def test_a_search_begins_at_a_quarter_of_the_servers_room(
    told: object, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(_asking: object, sessions: list[object], *_: object, **__: object) -> Any:
        good = Sample(0.0, 0.4, (0.1, 0.2, 0.3, 0.4), 10, 4, 0, "abcd", "length")
        return Ran([good for _ in sessions], Strain(1, 0.1, 1.0))

    (found,) = measured_with(load, told, monkeypatch)
    assert found.trials[0].users == first and found.status is Status.MOST


def test_each_workload_has_time_by_what_one_answer_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The warm-up's answer is short, and reckoned to its length; a workload without answers has
    none of the time."""
    until_s: list[tuple[int, float]] = []

    def load(asking: Any, sessions: list[Any], pace: Pace, *_: object, **__: object) -> Any:
        prompt, output = sessions[0].turns[0].prompt, sessions[0].turns[0].output_tokens
        until_s.append((output, asking.until_s))
        if len(prompt) == 5:
            return Ran([Sample(0.0, 0.1, error="400: no")], Strain(1, 0.1, 1.0))
        arrivals = tuple(0.5 + 0.01 * index for index in range(output))
        good = Sample(0.0, arrivals[-1], arrivals, 10, output, 0, "", "length")
        return Ran([good for _ in sessions], Strain(1, 0.1, 1.0))

    plan = dataclasses.replace(
        PLAN, workloads=(Workload(10, 51), Workload(5, 8), Workload(10, 251)), most_users=1,
        limit_s=900.0,
    )  # fmt: skip
    begun_s = time.perf_counter()
    found = measured_with(load, {}, monkeypatch, plan)
    assert [each.status for each in found] == [Status.MOST, Status.FAILED, Status.MOST]
    assert [output for output, _ in until_s] == [32, 8, 32, 51, 51, 251, 251]
    # Alone they take 1 s and 3 s: a quarter of the time, and then all that is left.
    assert until_s[3][1] - begun_s == pytest.approx(225, abs=5)
    assert until_s[5][1] - begun_s == pytest.approx(900, abs=5)


def test_workloads_are_read() -> None:
    assert WorkloadsType().convert("1/2, 30/40", None, None) == (Workload(1, 2), Workload(30, 40))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--measure"], "--measure needs a --model to load, or the --url of a server"),
        (["--url", "http://x"], "--url is of --measure"),
        (["--workloads", "128/128"], "--workloads is of --measure"),
        (["--ttft-s", "2"], "--ttft-s is of --measure"),
        (["--measure", "--model", "x", "--tp", "2"], "start `plait serve --tp 2`"),
        (["--measure", "--url", "x", "--workloads", "12"], "'12' is no PROMPT/OUTPUT"),
        (["--measure", "--url", "x", "--workloads", "0/1"], "both must be from 1"),
        (["--measure", "--url", "x", "--ttft-s", "0"], "0"),
        (["--measure", "--model", "/nowhere"], "there is no such folder"),
    ],
)
def test_what_does_not_go_together_is_refused(flags: list[str], said: str) -> None:
    done = CliRunner().invoke(capacity, flags)
    assert done.exit_code == 2 and said in done.output.replace("\n", " "), done.output


def test_a_server_that_is_not_there_is_said() -> None:
    done = CliRunner().invoke(capacity, ["--measure", "--url", "http://127.0.0.1:9"])
    assert done.exit_code == 1 and "does not answer" in done.output
