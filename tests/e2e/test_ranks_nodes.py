"""Two torchruns, as on two machines, whose ranks serve one model and end together.

Where this machine allows it, the second has a network namespace of its own: then nothing but a
pair of interfaces connects the two, and the network can be cut. Elsewhere both are on loopback.
"""

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.rank_jobs import FLAGS, GONE_S, Stream, answers, wait_until
from tests.server_process import ROOT, SOON_S, ServerProcess, serving_model


@dataclass(frozen=True)
class Network:
    """Between two machines."""

    first: str  # the first one's address, as rank 0 listens on it
    second: str
    entering: tuple[str, ...] = ()  # in front of a command of the second
    cut: Callable[[], None] | None = None


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def network() -> Iterator[Network]:
    name = f"plait{secrets.token_hex(3)}"
    net = f"10.{secrets.randbelow(200) + 20}.{secrets.randbelow(256)}"
    try:
        ip("netns", "add", name)
    except (OSError, subprocess.CalledProcessError):
        yield Network("127.0.0.2", "127.0.0.1")
        return
    try:
        ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
        ip("addr", "add", f"{net}.1/30", "dev", name)
        ip("link", "set", name, "up")
        ip("-n", name, "addr", "add", f"{net}.2/30", "dev", "eth0")
        for each in ("eth0", "lo"):
            ip("-n", name, "link", "set", each, "up")
        entering = ("ip", "netns", "exec", name)
        yield Network(f"{net}.1", f"{net}.2", entering, lambda: ip("link", "set", name, "down"))
    finally:
        ip("netns", "del", name)  # and with it both interfaces


@dataclass
class Job:
    """The torchruns of both machines. Rank 0 serves on loopback of the first."""

    server: ServerProcess
    second: subprocess.Popen[str]
    log: Path  # of the second
    each: int  # ranks a machine

    def ranks(self, node: int) -> list[int]:
        """Their processes."""
        pid = self.second.pid if node else self.server.process.pid
        found = []
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += [int(child) for child in (task / "children").read_text().split()]
        assert len(found) == self.each, found
        return sorted(found)

    def said(self) -> str:
        """By all, once all have ended."""
        return self.server.all_said() + self.log.read_text()


def free_port() -> int:
    with socket.socket() as asking:
        asking.bind(("", 0))
        return int(asking.getsockname()[1])


@contextmanager
def job(checkpoint: Path, folder: Path, network: Network, each: int, *flags: str) -> Iterator[Job]:
    """All ranks, of which rank 0 has begun to load; they are killed where they still run."""
    place = ["--nnodes", "2", "--nproc-per-node", str(each), "--master-addr", network.first,
             "--master-port", str(free_port())]  # fmt: skip
    arguments = ["-m", "tests.faulty_rank", str(folder), "--model", str(checkpoint), "--port", "0",
                 *FLAGS, *flags]  # fmt: skip
    environ = {"PYTHON_GIL": "0", "OMP_NUM_THREADS": "1"}
    if not network.entering:
        environ["PLAIT_RANK_HOST"] = network.first
    torchrun = "torch.distributed.run"
    log = folder / "second.log"
    with log.open("w") as opened:
        second = subprocess.Popen(
            [*network.entering, sys.executable, "-m", torchrun, *place, "--node-rank", "1",
             *arguments],
            cwd=ROOT, stdout=opened, stderr=opened, text=True, env={**os.environ, **environ},
        )  # fmt: skip
    server = None
    try:
        server = ServerProcess(torchrun, *place, "--node-rank", "0", *arguments, environ=environ)
        yield Job(server, second, log, each)
    finally:
        second.kill()
        for pid in [int(one.name) for one in Path("/proc").iterdir() if one.name.isdecimal()]:
            if is_there(pid, folder):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        second.wait(SOON_S)
        if server is not None:
            server.close()


def is_there(pid: int, folder: Path) -> bool:
    """Whether this rank still runs; one whose end torchrun has yet to hear of does not."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return False
    return "tests.faulty_rank" in words and str(folder) in words and "--nnodes" not in words


def listens_on(pid: int) -> set[str]:
    """The addresses at which this process can be reached."""
    files = set()
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # it was just closed
            files.add(os.readlink(each))
    found = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in files:  # linux/tcp_states.h
                raw = bytes.fromhex(words[1].partition(":")[0])
                found.add(socket.inet_ntoa(raw[::-1]) if name == "tcp" else f"IPv6 {raw.hex()}")
    return found


@pytest.mark.parametrize("each", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_ranks_of_two_machines_answer_as_one_and_drain_together(
    checkpoint: Path, tmp_path: Path, network: Network, each: int
) -> None:
    with serving_model(checkpoint, *FLAGS) as alone:
        expected = answers(alone.ready())
    with job(checkpoint, tmp_path, network, each) as running:
        assert answers(running.server.ready()) == expected
        running.server.wait_at_rest()
        ranks = running.ranks(0) + running.ranks(1)
        for address in set().union(*map(listens_on, ranks)):
            assert address in {network.first, network.second, "127.0.0.1"}, address
        stream = Stream(running.server, "abc", 60)
        assert stream.begun.wait(SOON_S)
        for agent in (running.second, running.server.process):
            agent.send_signal(signal.SIGTERM)
        assert not stream.has_failed() and stream.events[-1] == "data: [DONE]"
        assert wait_until(lambda: not any(is_there(pid, tmp_path) for pid in ranks), SOON_S)
        for agent in (running.second, running.server.process):
            agent.wait(SOON_S)
        said = running.said()
        assert "was told to end: the server drains" in said
        assert "CRITICAL" not in said and "is killed" not in said, said


FAULTS = {
    "kill rank 1": "rank 1 (at {there}) ended without a word",
    "stop rank 1": "rank 1 (at {there}) gives no sign of life: it hangs, is stopped, or is cut",
    "stop rank 0": "rank 0 (at {here}) gives no sign of life: it hangs, is stopped, or is cut",
    "raise rank 1": "RuntimeError: a fault on purpose",
    "kill torchrun": "rank 1 (at {there}) failed: link thread: torchrun has ended on this machine",
    "cut the network": "rank 1 (at {there}) gives no sign of life",
}


def strike(fault: str, running: Job, network: Network, folder: Path) -> None:
    if fault.startswith("raise"):
        (folder / "raise-1").touch()
    elif fault == "cut the network":
        assert network.cut is not None
        network.cut()
    elif fault == "kill torchrun":
        running.second.kill()
    else:
        sent = signal.SIGKILL if fault.startswith("kill") else signal.SIGSTOP
        os.kill(running.ranks(int(fault[-1]))[0], sent)


@pytest.mark.parametrize(
    "fault",
    [pytest.param(fault, marks=() if fault == "stop rank 1" else pytest.mark.slow)
     for fault in FAULTS],
)  # fmt: skip
def test_what_ends_a_rank_of_one_machine_ends_all(
    fault: str, checkpoint: Path, tmp_path: Path, network: Network
) -> None:
    """Within ten seconds, with the cause, and with an error for whoever waits for an answer."""
    if fault == "cut the network" and network.cut is None:
        pytest.skip("this machine has no network namespaces for its tests")
    with job(checkpoint, tmp_path, network, 1) as running:
        ranks = running.ranks(0) + running.ranks(1)
        port = int(running.server.ready().url.rpartition(":")[2])
        stream = Stream(running.server, "abc", 3500)
        assert stream.begun.wait(SOON_S)
        strike(fault, running, network, tmp_path)
        began_s = time.monotonic()
        are_gone = wait_until(lambda: not any(is_there(pid, tmp_path) for pid in ranks), GONE_S)
        assert are_gone, running.log.read_text()
        print(f"{fault}: all gone after {time.monotonic() - began_s:.1f} s")
        assert stream.has_failed()
        for agent in (running.server.process, running.second):
            assert agent.wait(SOON_S) != 0
        said = running.said()
        assert FAULTS[fault].format(here=network.first, there=network.second) in said, said
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", port))
