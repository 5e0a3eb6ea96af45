"""A rank above 0: executes what rank 0 sends, and decides nothing.

Three threads: the main thread keeps signals and the watchdog, the engine thread loads its part of
the model and runs descriptors, and the link thread keeps in touch with rank 0.

Rules
- Rank 0 alone says when it is over. A signal to end, which torchrun sends to every rank, is rank
  0's to obey, and passed on to it: until then its requests need this rank.
- Without rank 0 nothing is left to do: when it is gone, this process ends within moments.
- On another machine than rank 0's, nobody but this rank sees that torchrun is gone: it fails then.
"""

import logging
import os
import select
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Final, Protocol

from engine.errors import ModelError
from engine.request import Int32Array
from httpd.service import State
from runtime.engine_thread import Progress
from runtime.inbox import Wakeup
from runtime.lifecycle import Failure, Lifecycle, Outcome
from runtime.monitor import Watchdog, all_stacks
from runtime.ranks.facts import Facts
from runtime.ranks.leader import MEET_S
from runtime.ranks.links import Link, LinkClosed, RanksError, StepReceiver
from runtime.ranks.meeting import meet_rank_0
from runtime.ranks.rank import Address, Rank
from runtime.ranks.stopped import StoppedRanks
from runtime.ranks.watch import DRAIN, Watched
from runtime.worker import TICK_S, OperatorError, Pulse, Stopped, Worker

log = logging.getLogger(__name__)

_ANSWER_S: Final = 90.0  # rank 0 waits for all others first
_UNTIL_WATCHED_S: Final = 120  # that, and the start of threads
_JOIN_S: Final = 2.0
_STEPS_END_S: Final = 10.0  # for rank 0's engine thread to launch its last step
_LAST_RESORT_S: Final = 15.0  # more than all three
_REST_S: Final = 30  # more than that: for the kernel to wait
_ENDING: Final = (State.DRAINING, State.FAILED)


class RankExecutor(Protocol):
    """What is asked of an `engine.executor.Executor` here."""

    def launch_no_sync(self, descriptor: Int32Array) -> object: ...

    def close(self) -> None: ...


LoadRank = Callable[[Progress], RankExecutor]


def meet_leader(rank: Rank, facts: Facts) -> tuple[Link, StepReceiver, Address]:
    """The links to rank 0, and where the ranks' tensors meet.

    Raises RanksError where rank 0 does not come, or does not agree: why is in its log.
    """
    link, steps = meet_rank_0(rank, MEET_S)
    link.peer.renew(_UNTIL_WATCHED_S)
    try:
        link.send(facts)
        answer = link.wait(_ANSWER_S, StoppedRanks(rank, (0,)).check)
    except LinkClosed as error:
        raise RanksError(f"rank 0 ended ({error})") from error
    if "store" not in answer:
        raise RanksError("rank 0 ends: its log says why")
    host, port = answer["store"]
    return link, steps, (host, port)


class StepLoop:
    """Loads, then runs descriptors until no more come. Owned by the engine thread."""

    def __init__(self, load: LoadRank, steps: StepReceiver, lifecycle: Lifecycle) -> None:
        self._load, self._steps, self._lifecycle = load, steps, lifecycle

    def run(self, pulse: Pulse) -> None:
        """The thread's body."""
        pulse.watched = False  # as in loading on rank 0
        try:
            executor = self._load(partial(self._report, pulse))
        except (ModelError, OSError) as error:
            raise OperatorError(f"the model cannot be loaded: {error}") from error
        pulse.watched = True
        try:
            while not pulse.is_stopping:
                pulse.beat()
                block = self._steps.receive(TICK_S)
                if block is not None:
                    executor.launch_no_sync(block)
        except LinkClosed:
            while self._lifecycle.state not in _ENDING:  # why, the link's thread will hear
                pulse.beat()
                time.sleep(TICK_S / 10)
        finally:
            executor.close()

    def _report(self, pulse: Pulse, _doing: str, _done: float | None) -> None:
        pulse.beat()
        if self._lifecycle.state in _ENDING:
            raise Stopped


class LinkLoop:
    """Keeps in touch with rank 0. Owned by the link thread."""

    def __init__(
        self, link: Link, lifecycle: Lifecycle, wakeup: Wakeup, *, is_near: bool = True
    ) -> None:
        """
        wakeup   signalled when this rank's phase changes
        is_near  rank 0 is on this machine, and looks after torchrun itself
        """
        self._watched, self._lifecycle, self._wakeup = Watched(link), lifecycle, wakeup
        self._is_near = is_near
        self._parent = os.getppid()
        self._is_told_to_end = False
        self.exit_code = 1  # rank 0's word; read once the thread has ended

    def on_signal(self) -> None:
        """A wish to end, for rank 0 to hear of. Called by a signal handler."""
        self._is_told_to_end = True
        self._wakeup.signal()

    def run(self, pulse: Pulse) -> None:
        """The thread's body: returns at rank 0's word, or when this rank or rank 0 has failed."""
        peer = self._watched.link.peer
        try:
            while self._lifecycle.state not in _ENDING:
                pulse.beat()
                self._turn()
        except RanksError as error:
            self._lifecycle.fail(Failure("link", str(error)))
        finally:
            peer.renew(_REST_S)
        failure = self._lifecycle.failure
        if failure is not None:
            try:
                told = f"{failure.thread} thread: {failure.cause}"[:4000]
                self._watched.link.send({"failed": told})
            except LinkClosed:
                pass  # rank 0 is gone, too

    def _turn(self) -> None:
        link = self._watched.link
        readable, _, _ = select.select([self._wakeup, link], [], [], TICK_S)
        if self._wakeup in readable:
            self._wakeup.clear()
        for message in self._watched.receive() if link in readable else ():
            self.exit_code = int(message["end"])
            self._lifecycle.drain()
            return
        if self._is_told_to_end:
            self._is_told_to_end = False
            self._watched.tell(DRAIN)
        self._watched.beat()
        self._watched.check()
        if not self._is_near and os.getppid() != self._parent:
            raise RanksError("torchrun has ended on this machine")


class Follower:
    """A rank above 0, from its links to its exit code. Owned by the main thread."""

    def __init__(
        self,
        link: Link,
        steps: StepReceiver,
        load: LoadRank,
        watchdog_s: float,
        *,
        is_near: bool = True,
    ) -> None:
        """is_near  rank 0 is on this machine"""
        self._lifecycle = Lifecycle()
        self._wakeup, self._link_wakeup = Wakeup(), Wakeup()
        for wakeup in (self._wakeup, self._link_wakeup):
            self._lifecycle.subscribe(wakeup)
        self._watchdog = Watchdog(self._lifecycle, watchdog_s)
        self._link_loop = LinkLoop(link, self._lifecycle, self._link_wakeup, is_near=is_near)
        self._link = Worker("link", self._link_loop.run, self._lifecycle, ends_first=True)
        self._engine = Worker(
            "engine", StepLoop(load, steps, self._lifecycle).run, self._lifecycle, ends_first=True
        )

    def run(self) -> Outcome:
        """Executes until rank 0's word, or until something has failed."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._link_loop.on_signal())
        workers = [self._link, self._engine]
        for worker in workers:
            worker.start()
        while self._lifecycle.state not in _ENDING:
            select.select([self._wakeup], [], [], TICK_S)
            self._wakeup.clear()
            self._watchdog.check(workers)
        self._watchdog.arm(_LAST_RESORT_S)
        failure = self._lifecycle.failure
        if failure is not None:
            log.critical("this rank ends; %s thread: %s", failure.thread, failure.cause)
            if failure.is_hang:
                log.critical("all threads:\n%s", all_stacks())
        self._link.join(_JOIN_S)
        if failure is None and self._link_loop.exit_code == 0:
            self._engine.join(_STEPS_END_S)  # rank 0 may still need this one
        self._lifecycle.stop()
        all_ended = all([worker.join(_JOIN_S) for worker in workers])
        self._watchdog.disarm()
        failed = failure is not None or self._lifecycle.state is State.FAILED
        return Outcome(1 if failed else self._link_loop.exit_code, all_ended)
