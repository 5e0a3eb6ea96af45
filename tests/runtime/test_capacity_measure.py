"""What is measured of a server, judged and shown; and how flags go together. No server here."""

import io
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from client.bench.figures import summarise
from client.bench.load import Sample
from client.bench.runner import Pace
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
    )
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines()[4:-1]]
    assert rows == [
        ["10", "4", "8", "900.0", "40.0", "321.0", "missed with 9"],
        ["11", "4", "≥ 8", "900.0", "40.0", "321.0", "no more were tried"],
        ["12", "4", "≥ 8", "900.0", "40.0", "321.0", "time was up, missed with 9"],
        ["13", "4", "–", "", "", "", "the context has 16 tokens"],
        ["14", "4", "–", "", "", "", "400: [no]"],
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
        return [good if (pace.concurrency or 0) <= 3 else full for _ in sessions]

    monkeypatch.setattr("runtime.capacity.measure.run_load", load)
    monkeypatch.setattr("runtime.capacity.measure.ask_json", lambda *_: {})
    (found,) = measure(Target("http://x", "m"), PLAN, Console(file=io.StringIO()))
    assert (found.status, found.users, found.missed_at) == (Status.FOUND, 3, 4)


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
