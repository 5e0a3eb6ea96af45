"""What is asked of other threads besides generating: of the engine, and of every HTTP loop.

Rules
- One command is waited for at a time; whoever asks meanwhile waits for its turn on the loop.
- A command is known by its number, and so are its answers: whoever gave an earlier one may have
  gone.
- It ends with the answers of all who got it, or once the server has failed. A loop that has ended,
  as loops without requests do while the server drains, answers no more: it is not waited for long.
- At most `COMMANDS` on a line are without an answer that was taken, which is the room of its rings.
"""

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from engine.step_trace import StepRecord
from httpd.errors import not_ready
from httpd.running import Running
from httpd.service import Rejected, State
from runtime.channel import Receiver, Sender
from runtime.engine_thread import FlushCache, OutlineCache, ReadSteps
from runtime.inbox import Inbox, LoopInbox, Wakeup
from runtime.lifecycle import Lifecycle
from runtime.messages import Abort, Done
from runtime.monitor import all_stacks
from runtime.service import ThreadedService

COMMANDS: Final = 16
_LOOPS_S: Final = 2.0  # for every HTTP loop to answer


class Line:
    """Commands to one thread, and its answers: values with a `number`. Owned by one HTTP loop."""

    def __init__(self, commands: Sender[Any], answers: Receiver[Any]) -> None:
        self.answers = answers
        self._commands = commands
        self._taken = 0  # answers

    @property
    def has_room(self) -> bool:
        return self._commands.pushed - self._taken < COMMANDS

    def send(self, command: object) -> None:
        if not self._commands.try_push(command):
            raise RuntimeError("a ring that holds every command is full")

    def take(self) -> list[Any]:
        """The answers that have come."""
        answers = self.answers.pop_all()
        self._taken += len(answers)
        return answers


@dataclass(frozen=True, slots=True)
class ControlRings:
    """One HTTP loop's ends."""

    wakeup: Wakeup  # signalled by answers, and by each change of the server's phase
    engine: Line
    loops: tuple[Line, ...]  # to every one, this one too
    commands: tuple[tuple[Receiver[Abort], Sender[Done]], ...]  # from every one


class ServerControl:
    """`httpd.admin.Control` over threads. Owned by its HTTP loop."""

    def __init__(
        self,
        lifecycle: Lifecycle,
        rings: ControlRings,
        service: ThreadedService,
        *,
        keeps_steps: bool = True,
    ) -> None:
        """keeps_steps  whether the engine tells why its last steps were so"""
        self._keeps_steps = keeps_steps
        self.running = Running()
        self._lifecycle = lifecycle
        self._rings = rings
        self._service = service
        self._turn = asyncio.Lock()
        self._number = 0  # the last command's
        self._answers: list[Any] = []  # to it
        self._all_there: asyncio.Future[None] | None = None  # done once these are all

    async def flush_cache(self) -> int:
        (answer,) = await self._ask([self._rings.engine], FlushCache)
        return int(answer.pages)

    async def outline_cache(self) -> dict[str, Any]:
        (answer,) = await self._ask([self._rings.engine], OutlineCache)
        assert answer.outline is not None
        return dataclasses.asdict(answer.outline)

    async def read_steps(self, count: int) -> bytes:
        if not self._keeps_steps:
            message = "No steps are kept: start the server with --trace-steps 10000."
            raise Rejected(404, message, code="steps_not_traced")
        (answer,) = await self._ask([self._rings.engine], partial(ReadSteps, count=count))
        return await asyncio.to_thread(_lines, answer.steps)  # milliseconds for a thousand

    async def abort(self, response_id: str | None) -> int:
        done = await self._ask(
            self._rings.loops, partial(Abort, response_id=response_id), timeout_s=_LOOPS_S
        )
        return sum(each.count for each in done)

    def take_all(self) -> None:
        """Does what HTTP loops have commanded."""
        for commands, done in self._rings.commands:
            for command in commands.pop_all():
                if not done.try_push(Done(command.number, self._abort(command.response_id))):
                    raise RuntimeError("a ring that holds every answer is full")

    def _abort(self, response_id: str | None) -> int:
        if response_id is not None:
            return int(self.running.try_end(response_id))
        alive = self._service.alive
        self._service.abort_all()
        return alive

    def stacks(self) -> str:
        return all_stacks()

    async def _ask(
        self,
        lines: Sequence[Line],
        command: Callable[[int], object],
        timeout_s: float | None = None,
    ) -> list[Any]:
        """The answers; of those that come in time, where there is a time.

        command  makes it with its number

        Raises `Rejected` where nobody would answer.
        """
        async with self._turn:
            self._send(lines, command)
            inbox = Inbox(self._rings.wakeup, [line.answers for line in lines])
            listening = LoopInbox(inbox, partial(self._look, lines))
            self._all_there = asyncio.get_running_loop().create_future()
            listening.attach(asyncio.get_running_loop())
            try:
                with suppress(TimeoutError):
                    async with asyncio.timeout(timeout_s):
                        await self._all_there
                return self._answers
            finally:
                listening.detach()

    def _send(self, lines: Sequence[Line], command: Callable[[int], object]) -> None:
        """Raises `Rejected`."""
        state = self._lifecycle.state
        if state not in (State.READY, State.DRAINING):
            raise not_ready(state)
        for line in lines:
            line.take()  # what came for those who have gone
        if not all(line.has_room for line in lines):
            raise Rejected(503, "The server has not yet done what it was told.", code="busy")
        self._number, self._answers = self._number + 1, []
        for line in lines:
            line.send(command(self._number))

    def _look(self, lines: Sequence[Line]) -> None:
        """Takes what has come, and ends the wait where nothing more can."""
        assert self._all_there is not None
        for line in lines:
            self._answers += [each for each in line.take() if each.number == self._number]
        if self._all_there.done():
            return
        if len(self._answers) == len(lines):
            self._all_there.set_result(None)
        elif self._lifecycle.state is State.FAILED:
            self._all_there.set_exception(not_ready(State.FAILED))


def _lines(steps: tuple[StepRecord, ...]) -> bytes:
    return "".join(f"{step.as_json()}\n" for step in steps).encode()
