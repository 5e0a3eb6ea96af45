"""How ranks of several machines meet, prove who they are, and end; here both are this machine."""

import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.descriptor import StepDescriptor
from runtime.ranks import meeting, reception
from runtime.ranks.invitation import SECRET_BYTES, Invitation
from runtime.ranks.lease import Lease
from runtime.ranks.links import Link, RanksError
from runtime.ranks.meeting import await_ranks, meet_rank_0
from runtime.ranks.network import RANK_HOST, address_towards, host_of_rank_0, interface_towards
from runtime.ranks.peers import DistantRank
from runtime.ranks.proof import (
    CHALLENGE_BYTES,
    HELLO_BYTES,
    NoProof,
    answer,
    check_answer,
    check_hello,
    hello,
)
from runtime.ranks.rank import Rank
from runtime.ranks.reception import Door, Reception
from runtime.ranks.watch import BEAT, Watched

SOON_S = 60.0  # far more than anything here takes, on a busy machine too
SECRET = b"s" * SECRET_BYTES


class FakeInvitations:
    """torchrun's store, for one job. Safe from any thread."""

    def __init__(self) -> None:
        self.invitation: Invitation | None = None  # replaced whole
        self.withdrawn = False
        self._invited = threading.Event()

    def __call__(self, _place: Rank) -> "FakeInvitations":
        return self

    def invite(self, invitation: Invitation) -> None:
        self.invitation = invitation
        self._invited.set()

    def withdraw(self) -> None:
        self.withdrawn = True

    def try_read(self) -> Invitation | None:
        return self.invitation

    def wait(self) -> Invitation:
        assert self._invited.wait(SOON_S) and self.invitation is not None
        return self.invitation


@pytest.fixture
def invitations(monkeypatch: pytest.MonkeyPatch) -> FakeInvitations:
    fake = FakeInvitations()
    monkeypatch.setattr(meeting, "Invitations", fake)
    return fake


@pytest.fixture
def places() -> tuple[Rank, ...]:
    """Two machines of two ranks each."""
    job = secrets.token_hex(8)
    return tuple(Rank(rank, 4, job, rank % 2, 2, ("127.0.0.1", 5)) for rank in range(4))


def test_near_and_distant_ranks_get_every_block(
    places: tuple[Rank, ...], invitations: FakeInvitations, pool: ThreadPoolExecutor
) -> None:
    def follow(place: Rank) -> tuple[str, int]:
        link, receiver = meet_rank_0(place, SOON_S)
        with closing(link), closing(receiver):
            block = receiver.receive(SOON_S)
            assert block is not None
            return str(link.peer), int(block[1])

    following = [pool.submit(follow, place) for place in places[1:]]
    links, sender = await_ranks(places[0], SOON_S)
    assert [str(link.peer) for link in links] == [
        f"rank 1 (process {os.getpid()})", "rank 2 (at 127.0.0.1)", "rank 3 (at 127.0.0.1)",
    ]  # fmt: skip
    sender.send(StepDescriptor(7, np.arange(3, dtype=np.int32)).encode())
    assert [one.result(SOON_S) for one in following] == [
        (f"rank 0 (process {os.getpid()})", 7), ("rank 0 (at 127.0.0.1)", 7),
        ("rank 0 (at 127.0.0.1)", 7),
    ]  # fmt: skip
    assert invitations.withdrawn
    sender.close()
    for link in links:
        link.close()
    with pytest.raises(ConnectionRefusedError):  # the door is closed behind the last
        socket.create_connection((links[2].peer._host, invitations.wait().port), SOON_S)  # type: ignore[attr-defined]


STRANGERS = {
    "http": b"GET / HTTP/1.1\r\nHost: me\r\n\r\n" * 20,
    "zeros": bytes(HELLO_BYTES),
    "much": b"x" * (1 << 18),
    "short": b"x" * (HELLO_BYTES - 1),
    "nothing": b"",
}


@pytest.mark.parametrize("said", STRANGERS.values(), ids=list(STRANGERS))
def test_strangers_do_no_harm(
    places: tuple[Rank, ...],
    invitations: FakeInvitations,
    pool: ThreadPoolExecutor,
    said: bytes,
) -> None:
    places = tuple(replace(place, size=2, local_size=1, local_rank=0) for place in places[:2])
    waiting = pool.submit(await_ranks, places[0], SOON_S)
    port = invitations.wait().port
    strangers = [socket.create_connection(("127.0.0.1", port), SOON_S) for _ in range(5)]
    for stranger in strangers:
        with suppress(ConnectionError):
            stranger.sendall(said)
    link, receiver = meet_rank_0(places[1], SOON_S)
    links, sender = waiting.result(SOON_S)
    assert [one.peer.rank for one in links] == [1]
    for stranger in strangers:
        heard = b""
        with suppress(ConnectionError):
            while part := stranger.recv(1 << 12):
                heard += part
        assert len(heard) <= CHALLENGE_BYTES  # no word of rank 0's own
        stranger.close()
    for one in (link, receiver, sender, *links):
        one.close()


def test_who_has_another_secret_is_turned_away(
    places: tuple[Rank, ...],
    invitations: FakeInvitations,
    pool: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A rank of another job, or of this one's last start; it may come again, and knows better."""
    places = tuple(replace(place, size=2, local_size=1, local_rank=0) for place in places[:2])
    waiting = pool.submit(await_ranks, places[0], SOON_S)
    right = invitations.wait()
    wrong = replace(right, secret=SECRET)
    monkeypatch.setattr(invitations, "try_read", lambda: wrong)
    with pytest.raises(RanksError, match="rank 0 cannot be found: it has turned this rank away"):
        meet_rank_0(places[1], 0.3)
    assert "127.0.0.1:" in caplog.text and "does not know the job's secret" in caplog.text
    assert not waiting.done()
    monkeypatch.setattr(invitations, "try_read", lambda: right)
    link, receiver = meet_rank_0(places[1], SOON_S)
    links, sender = waiting.result(SOON_S)
    for one in (link, receiver, sender, *links):
        one.close()


def test_who_listens_must_be_rank_0(
    places: tuple[Rank, ...], invitations: FakeInvitations, pool: ThreadPoolExecutor
) -> None:
    """A stranger at its address learns nothing but a proof that is of no use elsewhere."""

    def pretend(listening: socket.socket) -> bytes:
        connection = listening.accept()[0]
        with connection:
            connection.sendall(bytes(CHALLENGE_BYTES))
            said = connection.recv(1 << 12)
            connection.sendall(bytes(32))
            return said

    with socket.create_server(("127.0.0.1", 0)) as listening:
        pretending = pool.submit(pretend, listening)
        invitations.invite(Invitation("127.0.0.1", listening.getsockname()[1], SECRET))
        with pytest.raises(RanksError, match="is not rank 0 of this job"):
            meet_rank_0(places[2], 0.0)
    assert len(pretending.result(SOON_S)) == HELLO_BYTES


def test_a_rank_that_cannot_reach_rank_0_says_where_it_looked(
    places: tuple[Rank, ...], invitations: FakeInvitations
) -> None:
    with pytest.raises(RanksError, match="it has not said where it is"):
        meet_rank_0(places[2], 0.1)
    invitations.invite(Invitation("127.0.0.1", 1, SECRET))
    with pytest.raises(RanksError, match=r"127\.0\.0\.1:1: .*; PLAIT_RANK_HOST on its machine"):
        meet_rank_0(places[2], 0.1)


def test_rank_0_says_where_others_did_not_come(
    places: tuple[Rank, ...], invitations: FakeInvitations
) -> None:
    with pytest.raises(RanksError, match=r"^rank 1, 2, 3 did not come to 127\.0\.0\.1:\d+ within"):
        await_ranks(places[0], 0.1)
    assert invitations.invitation is not None


@pytest.fixture
def door() -> Iterator[Door]:
    with socket.create_server(("127.0.0.1", 0), backlog=1000) as listening:
        yield Door(listening, SECRET)


def test_callers_are_few_and_each_has_little_time(
    door: Door, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reception, "_MOST_CALLERS", 3)
    with closing(Reception(2, [door])) as desk:
        strangers = [socket.create_connection(door.listening.getsockname()) for _ in range(10)]
        for _ in strangers:
            assert desk.turn(SOON_S) == []
            assert len(desk._callers) <= 3
        assert caplog.text.count("is one of too many") == 7
        later_s = time.monotonic() + 6.0
        monkeypatch.setattr(time, "monotonic", lambda: later_s)
        assert desk.turn(0.0) == [] and desk._callers == {}
        assert caplog.text.count("has not said who it is for 5 s") == 3
        for stranger in strangers:
            stranger.close()


def test_a_hello_may_come_in_pieces_and_what_follows_it_stays(door: Door) -> None:
    with closing(Reception(2, [door])) as desk:
        caller = socket.create_connection(door.listening.getsockname())
        assert desk.turn(SOON_S) == []
        said = hello(SECRET, caller.recv(CHALLENGE_BYTES), "steps", 1)
        for byte in said[:-1]:
            caller.sendall(bytes([byte]))
            assert desk.turn(SOON_S) == []
        caller.sendall(said[-1:] + b"and more")
        ((kind, peer, connection),) = desk.turn(SOON_S)
        assert (kind, peer.rank, connection.recv(100)) == ("steps", 1, b"and more")
        connection.close()
        caller.close()


# Proofs

WORDS = st.binary(min_size=CHALLENGE_BYTES, max_size=CHALLENGE_BYTES)


@settings(max_examples=30, deadline=None)
@given(WORDS, st.sampled_from(["control", "steps"]), st.integers(1, 3))
def test_both_sides_know_each_other(challenged: bytes, kind: str, rank: int) -> None:
    said = hello(SECRET, challenged, kind, rank)
    assert len(said) == HELLO_BYTES
    assert check_hello(SECRET, challenged, said, 4) == (kind, rank)
    check_answer(SECRET, challenged, said, answer(SECRET, challenged, said))


@settings(max_examples=30, deadline=None)
@given(WORDS, st.integers(0, 8 * HELLO_BYTES - 1))
def test_no_bit_of_a_proof_can_be_changed(challenged: bytes, bit: int) -> None:
    said = bytearray(hello(SECRET, challenged, "control", 1))
    answered = answer(SECRET, challenged, bytes(said))
    said[bit // 8] ^= 1 << bit % 8
    with pytest.raises(NoProof):
        check_hello(SECRET, challenged, bytes(said), 4)
    if bit < 8 * 32:
        changed = bytearray(answered)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(NoProof):
            check_answer(SECRET, challenged, bytes(said), bytes(changed))


def test_a_proof_is_of_no_use_again_nor_the_other_way_round() -> None:
    said = hello(SECRET, b"a" * CHALLENGE_BYTES, "control", 1)
    with pytest.raises(NoProof, match="secret"):
        check_hello(SECRET, b"b" * CHALLENGE_BYTES, said, 4)
    with pytest.raises(NoProof, match="secret"):
        check_hello(b"another", b"a" * CHALLENGE_BYTES, said, 4)
    with pytest.raises(NoProof, match="is not rank 0"):
        check_answer(SECRET, b"a" * CHALLENGE_BYTES, said, said[-32:])
    with pytest.raises(NoProof, match="is no rank of this job: 1"):
        check_hello(SECRET, b"a" * CHALLENGE_BYTES, said, 1)


@pytest.mark.parametrize(
    "raw",
    [b"", b"null", b"[]", b'["a", 5]', b'["a", 0, "%s"]' % (b"00" * 32), b'["a", 5, "00"]',
     b'["", 5, "%s"]' % (b"00" * 32), b'["a", {}, "00"]', b"\xff"],
)  # fmt: skip
def test_what_is_no_invitation_is_refused(raw: bytes) -> None:
    with pytest.raises(ValueError, match="torchrun's store has no invitation, but"):
        Invitation.decode(raw)


def test_an_invitation_arrives_as_it_was_written() -> None:
    invitation = Invitation("fe80::1", 4711, SECRET)
    assert Invitation.decode(invitation.encode()) == invitation


# Where rank 0 listens


def test_rank_0_listens_where_others_reach_it(places: tuple[Rank, ...]) -> None:
    assert host_of_rank_0(Rank(0, 2, "job", 0, 2), {RANK_HOST: "10.0.0.1"}) == "127.0.0.1"
    assert host_of_rank_0(places[0], {}) == "127.0.0.1"
    assert host_of_rank_0(places[0], {RANK_HOST: "127.0.0.3"}) == "127.0.0.3"
    unknown = replace(places[0], store=("no-such-host.invalid", 5))
    with pytest.raises(RanksError, match=r"no-such-host\.invalid is unknown"):
        host_of_rank_0(unknown, {})
    with pytest.raises(RanksError, match="which PLAIT_RANK_HOST names, is unknown"):
        host_of_rank_0(places[0], {RANK_HOST: "no-such-host.invalid"})
    with pytest.raises(RanksError, match="rank 0 cannot listen on 192.0.2.1"):
        meeting.listen_on("192.0.2.1")


def test_an_address_leads_to_its_interface() -> None:
    assert interface_towards("127.0.0.2") == "lo"
    try:
        own = address_towards("192.0.2.1")
    except OSError:
        pytest.skip("this machine has no way out")
    assert (
        interface_towards(own) == "lo"
        or interface_towards("192.0.2.1") in dict(socket.if_nameindex()).values()
    )


# Ends


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class FakeLease:
    """Of a kernel that would end this process. Owned by the test."""

    def __init__(self) -> None:
        self.renewed: list[int] = []

    def renew(self, seconds: int) -> None:
        self.renewed.append(seconds)


@pytest.fixture
def connected() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        theirs = socket.create_connection(listening.getsockname())
        ours = listening.accept()[0]
    yield ours, theirs
    ours.close()
    theirs.close()


def test_a_silent_distant_rank_is_given_up_and_cut_off(
    connected: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = connected
    clock, lease = Clock(), FakeLease()
    peer = DistantRank(1, ours)
    peer._lease = lease  # type: ignore[assignment]
    watched = Watched(Link(peer, ours), clock)
    for _ in range(20):
        clock.now_s += 4.9
        theirs.sendall(b'{"beat": 1}\n')
        assert watched.receive() == []
        watched.beat()
        watched.check()
    assert lease.renewed == [6] * 20
    assert not peer.wait_end(0.0)
    clock.now_s += 5.1
    with pytest.raises(
        RanksError,
        match=r"rank 1 \(at 127.0.0.1\) gives no sign of life: it hangs, is stopped, or is cut "
        r"from the network, for 5 s now; its link was closed",
    ):
        watched.check()
    theirs.settimeout(SOON_S)
    while theirs.recv(1 << 12):
        pass
    assert BEAT == {"beat": 1} and peer.wait_end(SOON_S)


def test_a_distant_rank_has_ended_when_its_link_has(
    connected: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = connected
    peer = Link(DistantRank(1, ours), ours).peer
    theirs.sendall(b'{"beat": 1}\n' * 1000)
    assert not peer.wait_end(0.01)
    theirs.sendall(b'{"beat": 1}\n')
    theirs.close()
    assert peer.wait_end(SOON_S)


def test_the_kernel_ends_a_stopped_process_that_holds_a_lease() -> None:
    program = """if True:
        import sys, time
        from runtime.ranks.lease import Lease
        lease = Lease()
        for _ in range(3):
            lease.renew(1)
            time.sleep(0.6)
        lease.renew(1)
        print("well", flush=True)
        time.sleep(600)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, env=os.environ
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == b"well\n"
        process.send_signal(signal.SIGSTOP)
        assert process.wait(SOON_S) == -signal.SIGKILL
        process.stdout.close()
    finally:
        process.kill()
        process.wait(SOON_S)


def test_a_lease_ends_when_it_is_closed() -> None:
    """This process would not live to tell."""
    lease = Lease()
    lease.renew(1)
    lease.renew(0)
    lease.close()
    with pytest.raises(OSError):
        lease.close()
