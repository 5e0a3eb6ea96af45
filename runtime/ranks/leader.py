"""Rank 0's watch over the other ranks, on a thread of its own.

Rules
- What ends one rank ends all: the server fails with the cause that the rank itself gives.
- The others are told of an end, and what does not obey is killed: nobody is left behind. A rank
  of another machine is cut off instead, which is its end: see `peers.py`.
- When torchrun is gone, which would have ended the ranks together, the server drains; so it does
  when another rank is told to end.
"""

import logging
import os
import select
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from httpd.service import State
from runtime.inbox import Wakeup
from runtime.lifecycle import Failure, Lifecycle
from runtime.ranks.facts import Facts, difference
from runtime.ranks.links import Link, LinkClosed, Message, RanksError, StepSender
from runtime.ranks.meeting import await_ranks, listen_on
from runtime.ranks.network import host_of_rank_0
from runtime.ranks.rank import Rank
from runtime.ranks.stopped import StoppedRanks
from runtime.ranks.watch import DRAIN, Watched
from runtime.worker import TICK_S, Pulse

log = logging.getLogger(__name__)

MEET_S: Final = 60.0  # for all processes to start, on a busy machine
_FACTS_S: Final = 30.0
_UNTIL_WATCHED_S: Final = 150  # all of the above and below, and the start of threads
_CLEAN_END_S: Final = 9.0  # for the others to end once they were told
_FAILED_END_S: Final = 2.0
_REST_S: Final = 30  # more than what follows takes
_LAST_WORDS_S: Final = 1.0  # for a rank to say why the engine thread lost it


@dataclass(frozen=True, slots=True)
class RankZero:
    """What rank 0 has of the other ranks, each part to be given to the thread that owns it."""

    links: Sequence[Link]  # the ranks thread's
    steps: StepSender  # the engine thread's
    listening: socket.socket  # the engine thread's: where the ranks' tensors find each other
    local_size: int  # ranks of this machine

    @property
    def size(self) -> int:
        """Of the whole group, this rank included."""
        return len(self.links) + 1


def gather_ranks(rank: Rank, facts: Facts) -> RankZero:
    """Meets all other ranks and compares what they would serve.

    Raises RanksError where one does not come, or differs; then all others end, too.
    """
    links, steps = await_ranks(rank, MEET_S)
    stopped = StoppedRanks(rank, range(1, rank.size))
    for link in links:
        link.peer.renew(_UNTIL_WATCHED_S)
        try:
            theirs = link.wait(_FACTS_S, stopped.check)
        except LinkClosed as error:
            raise RanksError(f"{link.peer} ended before it said what it serves") from error
        different = difference(link.peer.rank, theirs, facts)
        if different is not None:
            _tell_all(links, {"end": 1})
            raise RanksError(different)
    listening = listen_on(host_of_rank_0(rank))
    _tell_all(links, {"store": listening.getsockname()[:2]})
    return RankZero(links, steps, listening, rank.local_size)


class LeaderLoop:
    """Watches the other ranks until the server ends, then ends them. Owned by the ranks thread."""

    def __init__(self, links: Sequence[Link], lifecycle: Lifecycle, wakeup: Wakeup) -> None:
        """wakeup  signalled when the server's phase changes"""
        self._watched = [Watched(link) for link in links]
        self._lifecycle = lifecycle
        self._wakeup = wakeup
        self._parent = os.getppid()

    def run(self, pulse: Pulse) -> None:
        """The thread's body; ends the others in every case."""
        code = 1
        try:
            while not self._is_ending(pulse):
                self._turn(pulse)
            if self._lifecycle.state is State.FAILED:
                self._hear_last_words()
            else:
                code = 0
        except RanksError as error:
            self._lifecycle.fail(Failure("ranks", str(error)))
        finally:
            self._end_all(code)

    def _is_ending(self, pulse: Pulse) -> bool:
        return pulse.is_stopping or self._lifecycle.state is State.FAILED

    def _turn(self, pulse: Pulse) -> None:
        pulse.beat()
        links = [watched.link for watched in self._watched]
        readable, _, _ = select.select([self._wakeup, *links], [], [], TICK_S)
        if self._wakeup in readable:
            self._wakeup.clear()
        for watched in self._watched:
            if watched.link in readable:
                self._take(watched)
            watched.beat()
            watched.check()
        if os.getppid() != self._parent:
            self._parent = os.getppid()
            log.warning("torchrun has ended: the server drains")
            self._lifecycle.drain()

    def _take(self, watched: Watched) -> None:
        for message in watched.receive():
            if message == DRAIN:
                log.info("%s was told to end: the server drains", watched.link.peer)
                self._lifecycle.drain()
                continue
            raise RanksError(f"{watched.link.peer} failed: {message.get('failed', message)}")

    def _hear_last_words(self) -> None:
        """The engine thread may notice before this one that a rank is gone, and not know why."""
        deadline = time.monotonic() + _LAST_WORDS_S
        links = [watched.link for watched in self._watched]
        while (left_s := deadline - time.monotonic()) > 0:
            readable, _, _ = select.select(links, [], [], left_s)
            for watched in self._watched:
                if watched.link in readable:
                    try:
                        self._take(watched)
                    except RanksError as error:
                        log.critical("%s", error)
                        return

    def _end_all(self, code: int) -> None:
        for watched in self._watched:
            watched.link.peer.renew(_REST_S)
        _tell_all([watched.link for watched in self._watched], {"end": code})
        deadline = time.monotonic() + (_FAILED_END_S if code else _CLEAN_END_S)
        for watched in self._watched:
            peer = watched.link.peer
            if not peer.wait_end(deadline - time.monotonic()):
                peer.kill()
                log.warning("%s did not end; %s", peer, peer.fate)


def _tell_all(links: Sequence[Link], message: Message) -> None:
    for link in links:
        try:
            link.send(message)
        except LinkClosed:
            pass  # it has ended already
