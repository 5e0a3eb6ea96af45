"""Two processes that serve one model: the same answers as one, and one end for both.

The ranks are started as torchrun starts them, but without torchrun: it would hide what each does
by itself, and takes seconds to import.
"""

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.rank_jobs import FLAGS, GONE_S, Stream, answers, wait_until
from tests.server_process import ROOT, SOON_S, START_S, ServerProcess, serving_model

PHASES = ("start", "idle", "prefill", "decode", "drain")
FAULTS = ("kill", "stop", "raise")


@dataclass
class Job:
    """Rank 0, which serves, and rank 1."""

    folder: Path
    first: ServerProcess
    second: subprocess.Popen[str]
    log: Path  # of rank 1

    def process(self, rank: int) -> subprocess.Popen[str]:
        return self.second if rank else self.first.process

    def said(self) -> str:
        """By both, once both have ended."""
        return self.first.all_said() + self.log.read_text()


@contextmanager
def job(checkpoint: Path, folder: Path, *flags: str) -> Iterator[Job]:
    """Both ranks, of which rank 0 has begun to load; they are killed where they still run."""
    environ = {
        "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": secrets.token_hex(8),
    }  # fmt: skip
    arguments = [str(folder), "--model", str(checkpoint), "--port", "0", *FLAGS, *flags]
    log = folder / "rank-1.log"
    with log.open("w") as opened:
        second = subprocess.Popen(
            [sys.executable, "-m", "tests.faulty_rank", *arguments],
            cwd=ROOT, stdout=opened, stderr=opened, text=True,
            env={**os.environ, "PYTHON_GIL": "0", "OMP_NUM_THREADS": "1", **environ, "RANK": "1"},
        )  # fmt: skip
    first = None
    try:
        first = ServerProcess("tests.faulty_rank", *arguments, environ={**environ, "RANK": "0"})
        yield Job(folder, first, second, log)
    finally:
        second.kill()
        second.wait(SOON_S)
        if first is not None:
            first.close()


def enter(phase: str, running: Job) -> Stream | None:
    """Brings both ranks into `phase`; the stream that is open then."""
    if phase == "start":
        held = [running.folder / f"held-{rank}" for rank in (0, 1)]
        assert wait_until(lambda: all(one.exists() for one in held), START_S)
        return None
    running.first.ready()
    if phase == "idle":
        return None
    # A prompt of 3,500 tokens, one a step, or as many tokens of output, both take seconds.
    prompt, output = (3500, 20) if phase == "prefill" else (3, 3500)
    stream = Stream(running.first, "x" * prompt, output)
    if phase == "prefill":
        assert wait_until(lambda: running.first.occupancy()["running"] == 1, SOON_S)
        assert not stream.begun.is_set()
        return stream
    assert stream.begun.wait(SOON_S)
    if phase == "drain":
        for rank in (0, 1):  # as torchrun does
            running.process(rank).send_signal(signal.SIGTERM)
        assert wait_until(lambda: running.first.get("/ready").status_code == 503, SOON_S)
    return stream


def strike(fault: str, rank: int, running: Job) -> None:
    if fault == "raise":
        (running.folder / f"raise-{rank}").touch()
        return
    sent = signal.SIGKILL if fault == "kill" else signal.SIGSTOP
    running.process(rank).send_signal(sent)


def cells() -> list[Any]:
    """Every phase, fault and rank; those that differ in what they need always run."""
    always = {("decode", "kill", 1), ("prefill", "raise", 1), ("idle", "stop", 0),
              ("start", "kill", 0)}  # fmt: skip
    return [
        pytest.param(phase, fault, rank, id=f"{phase}-{fault}-rank{rank}",
                     marks=() if (phase, fault, rank) in always else pytest.mark.slow)
        for phase in PHASES for fault in FAULTS for rank in (0, 1)
    ]  # fmt: skip


@pytest.mark.parametrize(("phase", "fault", "rank"), cells())
def test_what_ends_one_rank_ends_all(
    phase: str, fault: str, rank: int, checkpoint: Path, tmp_path: Path
) -> None:
    if phase == "start":
        (tmp_path / "hold").touch()
    with job(checkpoint, tmp_path) as running:
        stream = enter(phase, running)
        port = int(running.first.url.rpartition(":")[2])
        strike(fault, rank, running)
        began_s = time.monotonic()
        if fault == "raise" and phase == "idle":  # it takes a step to raise
            stream = Stream(running.first, "abc", 100)
        for each in (0, 1):
            left_s = max(0.1, began_s + GONE_S - time.monotonic())
            assert running.process(each).wait(left_s) != 0, f"rank {each}"
        assert stream is None or stream.has_failed()
        said = running.said()
        if fault == "raise":
            assert "RuntimeError: a fault on purpose" in said
        else:
            words = {"kill": "ended without a word", "stop": "is stopped by a signal"}
            assert f"rank {rank} (process {running.process(rank).pid}) {words[fault]}" in said
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", port))


def test_two_ranks_answer_as_one_and_end_together(checkpoint: Path, tmp_path: Path) -> None:
    """Greedy, seeded, with penalties, under a grammar, with logprobs; then a drain."""
    with serving_model(checkpoint, *FLAGS) as alone:
        expected = answers(alone.ready())
    with job(checkpoint, tmp_path) as running:
        assert answers(running.first.ready()) == expected
        running.first.wait_at_rest()
        stream = Stream(running.first, "abc", 60)
        assert stream.begun.wait(SOON_S)
        for rank in (1, 0):
            running.process(rank).send_signal(signal.SIGTERM)
        assert not stream.has_failed() and stream.events[-1] == "data: [DONE]"
        assert [running.process(rank).wait(SOON_S) for rank in (0, 1)] == [0, 0]
        said = running.said()
        assert "Traceback" not in said and "ERROR" not in said and "CRITICAL" not in said, said


def test_ranks_that_differ_end_with_one_clear_message(checkpoint: Path, tmp_path: Path) -> None:
    """Started by hand, so that each has flags of its own."""
    environ = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": secrets.token_hex(8)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "runtime.serve", "--model", str(checkpoint), "--port", "0",
             "--page-size", size],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, "PYTHON_GIL": "0", **environ, "RANK": str(rank)},
        )
        for rank, size in enumerate(("16", "32"))
    ]  # fmt: skip
    said = [rank.communicate(timeout=START_S)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, 1]
    assert said[0] == (
        'Error: ranks differ: setting page_size is "16" on rank 0 and "32" on rank 1\n'
    )
    assert said[1] == "Error: rank 0 ends: its log says why\n"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_stopped_before_the_others_meet_it_ends_all(
    rank: int, checkpoint: Path
) -> None:
    """It has never said a word: only the machine knows that it is there."""
    job = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": secrets.token_hex(8)}
    command = [sys.executable, "-m", "runtime.serve", "--model", str(checkpoint), "--port", "0"]
    ranks = [
        subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, "PYTHON_GIL": "0", **job, "RANK": str(number)},
        )
        for number in (rank, 1 - rank)
    ]  # fmt: skip
    try:
        ranks[0].send_signal(signal.SIGSTOP)
        said = ranks[1].communicate(timeout=START_S)[0]  # it imports before it can look
        assert [one.wait(SOON_S) for one in ranks] == [-signal.SIGKILL, 1]
        told = f"Error: rank {rank} (process {ranks[0].pid}) is stopped by a signal; it was killed"
        assert said == f"{told}\n"
    finally:
        for one in ranks:
            one.kill()
            one.communicate(timeout=SOON_S)


@pytest.mark.slow
def test_tp_starts_ranks_and_passes_signals_and_exit_codes_on(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with serving_model(checkpoint, *FLAGS, "--tp", "2") as server:
        assert server.ready().ask("hello", model="tiny").status_code == 200
        server.end_clean()
    assert not [*tmp_path.iterdir()]  # nothing is left behind
    with serving_model(checkpoint, *FLAGS, "--tp", "2") as server:
        server.ready()
        children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children")
        last = int(children.read_text().split()[-1])
        os.kill(last, signal.SIGKILL)
        assert server.wait_exit() == 1
        assert "ended without a word" in server.all_said()


@pytest.mark.slow
def test_ranks_do_not_outlive_torchrun(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing can be done by a process that is killed; so rank 0 looks after it."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with serving_model(checkpoint, *FLAGS, "--tp", "2") as server:
        server.ready()
        children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children")
        ranks = [Path(f"/proc/{pid}") for pid in children.read_text().split()]
        assert len(ranks) == 2
        server.process.kill()
        assert wait_until(lambda: not any(rank.exists() for rank in ranks), GONE_S)
        assert "torchrun has ended: the server drains" in server.all_said()
    assert not [*tmp_path.iterdir()]  # nor is its folder left behind
