"""What is asked of the engine besides generating; it runs on another thread.

Rules
- One command is waited for at a time; whoever asks meanwhile waits for its turn on the loop.
- An answer is known by its number: whoever asked for an earlier one may have gone.
- A command ends with its answer, or once the server has failed.
- At most `COMMANDS` are without an answer that was taken, which is the room of both rings.
"""

import asyncio
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from engine.step_trace import StepRecord
from httpd.errors import not_ready
from httpd.service import Rejected, State
from runtime.channel import Receiver, Sender
from runtime.engine_thread import Answer, Command, FlushCache, OutlineCache, ReadSteps
from runtime.inbox import Inbox, LoopInbox, Wakeup
from runtime.lifecycle import Lifecycle
from runtime.monitor import all_stacks
from runtime.service import ThreadedService

COMMANDS: Final = 16


@dataclass(frozen=True, slots=True)
class ControlRings:
    """The HTTP loop's ends."""

    wakeup: Wakeup  # signalled by answers, and by each change of the server's phase
    commands: Sender[Command]
    answers: Receiver[Answer]


class ServerControl:
    """`httpd.admin.Control` over threads. Owned by the HTTP loop."""

    def __init__(self, lifecycle: Lifecycle, rings: ControlRings, service: ThreadedService) -> None:
        self._lifecycle = lifecycle
        self._rings = rings
        self._service = service
        self._turn = asyncio.Lock()
        self._asked = 0  # commands so far; the last one's number
        self._answered = 0  # the number of the last answer taken
        self._answer: asyncio.Future[Answer] | None = None  # to the last command

    async def flush_cache(self) -> int:
        return (await self._ask(FlushCache)).pages

    async def outline_cache(self) -> dict[str, Any]:
        outline = (await self._ask(OutlineCache)).outline
        assert outline is not None
        return dataclasses.asdict(outline)

    async def read_steps(self, count: int) -> bytes:
        steps = (await self._ask(partial(ReadSteps, count=count))).steps
        return await asyncio.to_thread(_lines, steps)  # milliseconds for a thousand

    async def _ask(self, command: Callable[[int], Command]) -> Answer:
        """command  makes it with its number"""
        async with self._turn:
            self._answer = asyncio.get_running_loop().create_future()
            self._send(command)
            inbox = LoopInbox(Inbox(self._rings.wakeup, [self._rings.answers]), self._look)
            inbox.attach(asyncio.get_running_loop())
            try:
                return await self._answer
            finally:
                inbox.detach()

    def abort_all(self) -> int:
        alive = self._service.alive
        self._service.abort_all()
        return alive

    def stacks(self) -> str:
        return all_stacks()

    def _send(self, command: Callable[[int], Command]) -> None:
        """Raises `Rejected` where nobody would answer."""
        state = self._lifecycle.state
        if state not in (State.READY, State.DRAINING):
            raise not_ready(state)
        self._look()  # for answers to those who left
        if self._asked - self._answered >= COMMANDS:
            raise Rejected(503, "The engine has not yet done what it was told.", code="busy")
        self._asked += 1
        if not self._rings.commands.try_push(command(self._asked)):
            raise RuntimeError("a ring that holds every command is full")

    def _look(self) -> None:
        """Takes what has come, and ends the wait where nothing more can."""
        assert self._answer is not None
        for answer in self._rings.answers.pop_all():
            self._answered = answer.number
            if answer.number == self._asked and not self._answer.done():
                self._answer.set_result(answer)
        if self._lifecycle.state is State.FAILED and not self._answer.done():
            self._answer.set_exception(not_ready(State.FAILED))


def _lines(steps: tuple[StepRecord, ...]) -> bytes:
    return "".join(f"{step.as_json()}\n" for step in steps).encode()
