"""`plait capacity --measure` against a real server of a small model, whatever ends a search."""

import io
import json
from dataclasses import replace

import pytest
from click.testing import CliRunner
from rich.console import Console

from client.target import Target
from runtime.capacity.command import capacity
from runtime.capacity.measure import Measured, Plan, Workload, measure
from runtime.capacity.search import Status
from tests.server_process import ServerProcess

PATIENT = Plan((Workload(20, 5),), ttft_s=60.0, itl_ms=60_000.0, most_users=3, rounds=2, vocab=200)


def measured(server: ServerProcess, plan: Plan) -> list[Measured]:
    return measure(Target(server.url, "tiny"), plan, Console(file=io.StringIO()))


def test_a_server_that_carries_all_that_is_tried(tiny: ServerProcess) -> None:
    plan = replace(PATIENT, workloads=(Workload(4096, 1), *PATIENT.workloads))
    too_long, found = measured(tiny, plan)
    assert too_long.status is Status.CONTEXT and "4,096" in str(too_long.why)
    assert (found.status, found.users, found.missed_at) == (Status.MOST, 3, None)
    users = [trial.users for trial in found.trials]
    assert users[-2:] == [3, 3] and set(users[:-2]) <= {1, 2}
    assert [trial.requests for trial in found.trials] == [2 * each for each in users]
    assert all(trial.client is not None and trial.client.threads == 1 for trial in found.trials)
    assert all(trial.kept and trial.output_tokens_per_s > 0 for trial in found.trials)
    tiny.wait_at_rest()


def test_a_promise_that_nobody_keeps(tiny: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("client.bench.strain.LAG_MS", 60_000.0)  # this machine may be busy
    (found,) = measured(tiny, replace(PATIENT, ttft_s=1e-3))
    assert (found.status, found.users, found.missed_at) == (Status.NONE, 0, 1)
    assert [trial.users for trial in found.trials][-2:] == [1, 1], "asked twice"
    tiny.wait_at_rest()


@pytest.mark.parametrize("limit_s", [0.001, 0.5])
def test_time_runs_out(tiny: ServerProcess, limit_s: float) -> None:
    """Also in the middle of a trial, which is then not waited for."""
    long = replace(PATIENT, workloads=(Workload(20, 4000),), limit_s=limit_s)
    (found,) = measured(tiny, long)
    assert (found.status, found.users, found.trials) == (Status.TIME, 0, ())
    tiny.wait_at_rest()


def test_as_a_program(tiny: ServerProcess) -> None:
    """Ids beyond this model's vocabulary: a server that refuses everything is no slow one."""
    asked = ["--measure", "--url", tiny.url, "--workloads", "200/2", "--json"]
    done = CliRunner(catch_exceptions=False).invoke(capacity, asked)
    assert done.exit_code == 1
    told = json.loads(done.stdout)["measured"]
    assert told["server"] == {"url": tiny.url, "model": "tiny"}
    assert told["targets"] == {"ttft_p99_ms": 2000.0, "itl_p50_ms": 50.0}
    (found,) = told["workloads"]
    assert found["status"] == "failed" and found["why"].startswith("400")
