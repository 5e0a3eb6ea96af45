"""How ranks meet, talk and notice an end; threads and child processes stand for ranks."""

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engine.config import EngineConfig
from engine.descriptor import StepDescriptor
from runtime.ranks import meeting, stopped
from runtime.ranks.facts import difference, facts_of, fingerprint
from runtime.ranks.links import (
    Link,
    LinkClosed,
    RanksError,
    StepReceiver,
    StepSender,
)
from runtime.ranks.meeting import await_ranks, meet_rank_0
from runtime.ranks.peers import RankProcess, is_stopped
from runtime.ranks.proof import CHALLENGE_BYTES, NO_SECRET, hello
from runtime.ranks.rank import Rank
from runtime.ranks.stopped import StoppedRanks
from runtime.ranks.watch import BEAT, Watched

SOON_S = 20.0


@pytest.fixture
def job() -> str:
    return secrets.token_hex(8)


def descriptor(step: int, tokens: int) -> StepDescriptor:
    return StepDescriptor(
        step=step,
        decode_rows=np.arange(3, dtype=np.int32),
        segments=np.array([[0, 0, tokens, 1]], np.int32),
        prefill_tokens=np.full(tokens, step, np.int32),
    )


def test_every_rank_gets_every_block_whole_and_in_order(job: str, pool: ThreadPoolExecutor) -> None:
    sizes = [1, 3_000_000, 5, 40_000, 2]  # the second is more than a socket holds

    def follow(rank: int) -> list[tuple[int, int]]:
        link, receiver = meet_rank_0(at(job, rank), SOON_S)
        seen = []
        with pytest.raises(LinkClosed):
            while True:
                block = receiver.receive(SOON_S)
                assert block is not None
                seen.append((int(block[1]), int((block == block[1]).sum())))
        receiver.close()
        link.close()
        return seen

    ranks = [pool.submit(follow, rank) for rank in (2, 1)]
    found, sender = await_ranks(at(job, 0, 3), SOON_S)
    assert [link.peer.rank for link in found] == [1, 2]
    assert [link.peer.pid for link in found] == [os.getpid()] * 2
    sent = [descriptor(100 + index, size).encode() for index, size in enumerate(sizes)]
    for block in sent:
        sender.send(block)
    sender.close()
    expected = [(int(block[1]), int((block == block[1]).sum())) for block in sent]
    assert [rank.result(SOON_S) for rank in ranks] == [expected] * 2
    for link in found:
        link.close()


def step_ends() -> tuple[StepSender, StepReceiver, socket.socket]:
    ours, theirs = socket.socketpair()
    return StepSender([ours]), StepReceiver(theirs), ours


def test_a_rank_that_waits_looks_up_now_and_then() -> None:
    sender, receiver, _ = step_ends()
    assert receiver.receive(0.01) is None
    sender.send(descriptor(7, 2).encode())
    block = receiver.receive(0.01)
    assert block is not None and block[1] == 7
    sender.close()
    receiver.close()


@pytest.mark.parametrize(
    "spoilt", [{0: 99}, {2: 3}, {2: -1}], ids=["version", "too short", "negative"]
)
def test_what_is_no_descriptor_is_refused(spoilt: dict[int, int]) -> None:
    sender, receiver, _ = step_ends()
    block = descriptor(7, 2).encode()
    for word, value in spoilt.items():
        block[word] = value
    sender.send(block)
    with pytest.raises(ValueError, match="not a step descriptor of version"):
        receiver.receive(SOON_S)
    sender.close()
    receiver.close()


def test_a_block_that_breaks_off_is_no_block() -> None:
    sender, receiver, ours = step_ends()
    ours.sendall(descriptor(7, 200).encode()[:100])
    sender.close()
    with pytest.raises(LinkClosed):
        receiver.receive(SOON_S)
    receiver.close()


def test_who_does_not_come_is_named(job: str, pool: ThreadPoolExecutor) -> None:
    coming = pool.submit(meet_rank_0, at(job, 2), SOON_S)
    with pytest.raises(RanksError, match=r"^rank 1, 3 did not come within 1 s$"):
        await_ranks(at(job, 0, 4), 1.0)
    link, receiver = coming.result(SOON_S)
    link.close()
    receiver.close()
    with pytest.raises(RanksError, match="rank 0 cannot be found"):
        meet_rank_0(at(job, 1), 0.1)


def test_who_is_stopped_before_the_meeting_is_ended(
    job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By whatever torchrun told it; another job's process stays as it is."""
    monkeypatch.setattr(stopped, "LOOK_S", 0.01)
    mine = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": "1", "MASTER_PORT": job}
    with sleeping(**mine) as rank, sleeping(**{**mine, "MASTER_PORT": job[1:]}) as stranger:
        stop(rank, stranger)
        looking = StoppedRanks(Rank.of_environment(mine), (1,))
        with pytest.raises(RanksError, match=rf"rank 1 \(process {rank.pid}\) is stopped by a"):
            for _ in range(1000):
                looking.check()
                time.sleep(0.01)
        assert rank.wait(SOON_S) == -signal.SIGKILL
        assert stranger.poll() is None and is_stopped(stranger.pid)


def test_a_job_that_is_stopped_and_goes_on_is_left_alone(
    job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stopped, "LOOK_S", -1.0)
    mine = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": "1", "MASTER_PORT": job}
    looking = StoppedRanks(Rank.of_environment(mine), (1,))
    with sleeping(**mine) as rank:
        for _ in range(3):
            stop(rank)
            looking.check()
            looking.check()
            rank.send_signal(signal.SIGCONT)
            os.waitid(os.P_PID, rank.pid, os.WCONTINUED)
            looking.check()
        assert rank.poll() is None


def at(job: str, rank: int, size: int = 4) -> Rank:
    """A place on one machine."""
    return Rank(rank, size, job, rank, size)


def connected(job: str) -> socket.socket:
    """Whoever knocks at the meeting point, as soon as it is there."""
    while True:
        stranger = socket.socket(socket.AF_UNIX)
        with suppress(OSError):
            stranger.connect(meeting._meeting_point(at(job, 1)))
            return stranger
        stranger.close()


def greeted(stranger: socket.socket, kind: str, rank: int) -> bytes:
    """What a process that knows how to greet would say."""
    stranger.settimeout(SOON_S)
    return hello(NO_SECRET, stranger.recv(CHALLENGE_BYTES), kind, rank)


def test_a_job_has_one_rank_0_and_one_of_each_other(job: str, pool: ThreadPoolExecutor) -> None:
    waiting = pool.submit(await_ranks, at(job, 0, 3), SOON_S)
    link, receiver = meet_rank_0(at(job, 1), SOON_S)
    with pytest.raises(RanksError, match="another job of this machine has the name"):
        await_ranks(at(job, 0, 2), 0.1)
    again = connected(job)
    again.sendall(greeted(again, "control", 1))
    with pytest.raises(RanksError, match="is there twice"):
        waiting.result(SOON_S)
    for one in (link, receiver, again):
        one.close()


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n" * 9,
        ("steps", 5),
        ("control", 0),
        b"",
        None,
    ],
)
def test_who_is_no_rank_is_turned_away_and_the_job_goes_on(
    job: str,
    pool: ThreadPoolExecutor,
    caplog: pytest.LogCaptureFixture,
    said: bytes | tuple[str, int] | None,
) -> None:
    """Nor does the rank wait for a stranger to be turned away.

    said  by the stranger, "" where it hangs up; None: it stays, and says nothing
    """
    waiting = pool.submit(await_ranks, at(job, 0, 2), SOON_S)
    stranger = connected(job)
    stranger.sendall(greeted(stranger, *said) if isinstance(said, tuple) else said or b"")
    if said == b"":
        stranger.close()
    link, receiver = meet_rank_0(at(job, 1), SOON_S)
    (own,), sender = waiting.result(SOON_S)
    assert own.peer.rank == 1
    if said:
        assert "turned away from the ranks' meeting point" in caplog.text
    if said != b"":
        stranger.settimeout(SOON_S)
        with suppress(ConnectionResetError):
            while stranger.recv(100):
                pass
    for one in (stranger, link, receiver, own, sender):
        one.close()


def test_strangers_do_not_put_off_the_end_of_the_wait(job: str, pool: ThreadPoolExecutor) -> None:
    waiting = pool.submit(await_ranks, at(job, 0, 2), 0.3)
    connected(job).close()
    while not waiting.done():
        with suppress(OSError), socket.socket(socket.AF_UNIX) as stranger:  # it has just ended
            stranger.connect(meeting._meeting_point(at(job, 1)))
    with pytest.raises(RanksError, match=r"^rank 1 did not come within 0\.3 s$"):
        waiting.result(SOON_S)


def test_another_users_process_is_turned_away(
    job: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The kernel's word counts; here it is this process that says it is somebody else."""
    point = meeting._meeting_point(at(job, 1))
    monkeypatch.setattr(meeting, "_meeting_point", lambda _place: point)
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(await_ranks, at(job, 0, 2), 0.5)
        with connected(job):
            with pytest.raises(RanksError, match="rank 1 did not come"):
                waiting.result(SOON_S)
    assert "of user" in caplog.text


def test_lines_arrive_whole_however_they_are_cut() -> None:
    ours, theirs = socket.socketpair()
    link = Link(RankProcess(1, os.getpid()), theirs)
    assert link.receive() == []
    whole = json.dumps({"failed": "é" * 50}).encode() + b"\n" + json.dumps(BEAT).encode() + b"\n"
    messages = []
    for byte in whole:
        ours.sendall(bytes([byte]))
        messages += link.receive()
    assert messages == [{"failed": "é" * 50}, BEAT]
    ours.close()
    with pytest.raises(LinkClosed):
        link.receive()
    link.close()


def test_an_answer_may_come_together_with_the_first_beat() -> None:
    """A rank that is slow to look finds both."""
    ours, theirs = socket.socketpair()
    link = Link(RankProcess(0, os.getpid()), theirs)
    with pytest.raises(RanksError, match=r"rank 0 \(process \d+\) has said nothing for 0.01 s"):
        link.wait(0.01)
    for message in ({"store": ["here", 5]}, BEAT, {"end": 0}):
        ours.sendall(json.dumps(message).encode() + b"\n")
    assert link.wait(SOON_S) == {"store": ["here", 5]}
    assert link.receive() == [BEAT, {"end": 0}] and link.receive() == []
    ours.close()
    link.close()


@contextmanager
def sleeping(**environ: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process with these variables that does nothing."""
    process = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"], env={**os.environ, **environ}
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait(SOON_S)


def stop(*processes: subprocess.Popen[bytes]) -> None:
    for process in processes:
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with sleeping() as process:
        yield process


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def watched(process: subprocess.Popen[bytes]) -> tuple[Watched, socket.socket, Clock]:
    ours, theirs = socket.socketpair()
    clock = Clock()
    return Watched(Link(RankProcess(1, process.pid), ours), clock), theirs, clock


def test_a_rank_that_speaks_is_left_alone(child: subprocess.Popen[bytes]) -> None:
    one, other_end, clock = watched(child)
    for _ in range(100):
        clock.now_s += 1.0
        other_end.sendall(json.dumps(BEAT).encode() + b"\n")
        assert one.receive() == []
        one.beat()
        one.check()
    assert other_end.recv(1 << 16).count(b"beat") == 100
    assert child.poll() is None
    other_end.close()
    one.link.close()


@pytest.mark.parametrize(
    ("stopped", "patient_s", "how"),
    [(True, 2.9, "is stopped by a signal"), (False, 29.0, "gives no sign of life")],
)
def test_a_silent_rank_is_killed(
    child: subprocess.Popen[bytes], stopped: bool, patient_s: float, how: str
) -> None:
    """One that a signal has stopped sooner than one that may only be starved."""
    one, other_end, clock = watched(child)
    if stopped:
        stop(child)
    clock.now_s = patient_s
    one.check()
    clock.now_s += 1.1
    with pytest.raises(RanksError, match=rf"rank 1 \(process {child.pid}\) {how}"):
        one.check()
    assert child.wait(SOON_S) == -signal.SIGKILL
    other_end.close()
    one.link.close()


def test_an_ended_rank_is_told_of(child: subprocess.Popen[bytes]) -> None:
    one, other_end, clock = watched(child)
    other_end.close()
    with pytest.raises(RanksError, match="ended without a word"):
        one.receive()
    clock.now_s = 2.0
    with pytest.raises(RanksError, match="takes no word"):
        one.beat()
    one.link.close()


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    (tmp_path / "config.json").write_text("{}")
    header = b'{"a": 1}'
    weights = len(header).to_bytes(8, "little") + header + bytes(100)
    (tmp_path / "model.safetensors").write_bytes(weights)
    return EngineConfig(tmp_path)


def test_ranks_fit_whatever_their_devices(config: EngineConfig) -> None:
    facts = facts_of(config)
    assert difference(1, json.loads(json.dumps(facts)), facts) is None
    own = replace(config, device="cpu", cpu_threads=1, memory_fraction=0.5)
    assert difference(1, facts_of(own), facts) is None


def test_a_difference_is_told_in_one_line(config: EngineConfig) -> None:
    facts = facts_of(config)
    told = difference(3, {**facts, "package torch": "1.0"}, facts)
    assert told is not None and told.startswith("ranks differ: package torch is ")
    assert told.endswith('on rank 0 and "1.0" on rank 3') and "\n" not in told
    assert difference(1, {}, facts) is not None


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / "config.json").write_text('{"a": 1}'),
        lambda folder: (folder / "model.safetensors").write_bytes(bytes(116)),
        lambda folder: (folder / "more.safetensors").write_bytes(bytes(8)),
    ],
    ids=["config", "header", "file"],
)
def test_another_checkpoint_has_another_fingerprint(
    config: EngineConfig, change: Callable[[Path], None]
) -> None:
    before = fingerprint(config.model)
    assert fingerprint(config.model) == before
    change(config.model)
    assert fingerprint(config.model) != before


DISTANT = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "one", "MASTER_PORT": "5", "TORCHELASTIC_USE_AGENT_STORE": "True",
}  # fmt: skip


def test_torchrun_says_which_rank_of_which_machine_this_is() -> None:
    place = Rank.of_environment(DISTANT)
    assert place == Rank(3, 4, "--5", 1, 2, ("one", 5))
    assert place.near == range(2, 4) and not place.is_near
    first = Rank.of_environment({**DISTANT, "RANK": "1"})
    assert first.near == range(2) and first.is_near


def test_torchrun_says_which_rank_this_is() -> None:
    assert Rank.of_environment({}) == Rank(job="--")
    told = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "5",
            "TORCHELASTIC_RUN_ID": "abc", "TORCHELASTIC_RESTART_COUNT": "0"}  # fmt: skip
    assert Rank.of_environment(told) == Rank(1, 2, "abc-0-5", 1, 2)
    assert Rank.of_environment({"WORLD_SIZE": "1", "RANK": "0"}).is_alone


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        ({"RANK": "0", "WORLD_SIZE": "two"}, "must be whole numbers"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, "RANK is 4; it must be at least 0 and below"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE is 0; it must be between 1 and 64"),
        ({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "3"}, "LOCAL_WORLD_SIZE is 3; it must be"),
        ({**DISTANT, "LOCAL_RANK": "2"}, "LOCAL_RANK is 2, which does not fit RANK 3, WORLD_SIZE"),
        ({**DISTANT, "RANK": "0"}, "LOCAL_RANK is 1, which does not fit RANK 0, WORLD_SIZE 4"),
        ({**DISTANT, "TORCHELASTIC_USE_AGENT_STORE": "False"}, "need torchrun's own store"),
        ({**DISTANT, "MASTER_ADDR": ""}, "need torchrun's own store"),
        ({**DISTANT, "MASTER_PORT": "http"}, "need torchrun's own store"),
    ],
)
def test_a_place_that_cannot_be_served_is_refused(environ: dict[str, str], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Rank.of_environment(environ)
