"""How much of a loop's time goes to what clients send, so that answers flow on in between.

asyncio serves whoever is ready, in order: a hundred connections that each bring a millisecond of
work would hold every stream for a tenth of a second.

Rules
- What a connection's own task does, and what an app's does before it answers, is work on input; the
  steps of those tasks are timed. All else of a turn of the loop, answers above all, is not.
- Work on input begins only while the loop's turn has had less than its share; the rest waits for
  the next turn. One piece cannot be interrupted: what it takes too much, later turns go without.
- Steps are measured in the thread's own time: on a machine that is busy with other programs, they
  would otherwise seem long, and input would get next to nothing.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Final, Generic, TypeVar

# Of work that is begun: what a turn then takes of input is this and one piece more, and a token
# passes through about three turns from its ring to its socket.
BUDGET_S: Final = 4e-3
_MOST_DEBT_S: Final = 50e-3  # longer, and those whom it keeps waiting would ask what is wrong
_MEAN_OF: Final = 16  # pieces

Result = TypeVar("Result")


class Turns:
    """Says when input may be worked on. Owned by one HTTP loop, whose connections all ask it."""

    def __init__(self) -> None:
        self._spent_s = 0.0  # in this turn, and what those before have had too much
        self._piece_s = BUDGET_S / 4  # what a piece takes: a moving mean
        self._step_began_s = math.inf  # time.thread_time(), while a step of a counted task runs
        self._is_piece = False  # whether that step is more than coming here to wait
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._returned = 0  # of those, in this turn, who had been let in too early: the first ones
        self._will_end = False  # the turn: `_end_turn` is on its way

    async def wait(self) -> None:
        """Returns at once, or in a later turn; called in counted tasks."""
        # Nobody asks again and again: a thousand who do would take all of the share.
        is_next = not self._waiting
        while not is_next or self._has_had_its_share():
            may_begin = asyncio.get_running_loop().create_future()
            if is_next:  # those before took longer than was expected
                self._waiting.insert(self._returned, may_begin)
                self._returned += 1
            else:
                self._waiting.append(may_begin)
            self._await_end()
            await may_begin
            is_next = True
        self._is_piece = True

    def _has_had_its_share(self) -> bool:
        return self._spent_s + time.thread_time() - self._step_began_s >= BUDGET_S

    async def count(
        self, work: Coroutine[Any, Any, Result], is_input: Callable[[], bool] = lambda: True
    ) -> Result:
        """Does `work`; its steps that begin while `is_input` count."""
        return await _Steps(self, work, is_input)

    def begin_step(self) -> None:
        self._is_piece = False
        self._step_began_s = time.thread_time()

    def end_step(self) -> None:
        took_s = time.thread_time() - self._step_began_s
        self._step_began_s = math.inf
        self._spent_s = min(self._spent_s + took_s, _MOST_DEBT_S)
        if self._is_piece:
            self._piece_s += (took_s - self._piece_s) / _MEAN_OF
        self._await_end()

    def _await_end(self) -> None:
        if not self._will_end:
            self._will_end = True
            asyncio.get_running_loop().call_soon(self._end_turn)

    def _end_turn(self) -> None:
        """Called early in the next turn."""
        self._will_end, self._returned = False, 0
        self._spent_s = max(0.0, self._spent_s - BUDGET_S)
        expected_s = self._spent_s
        while self._waiting and expected_s < BUDGET_S:
            may_begin = self._waiting.popleft()
            if not may_begin.done():  # else its client has left
                may_begin.set_result(None)
                expected_s += self._piece_s
        if self._waiting or self._spent_s > 0:
            self._await_end()


class _Steps(Generic[Result]):
    """Drives a coroutine as a task does, and times each step of it. Owned by its HTTP loop."""

    def __init__(
        self, turns: Turns, work: Coroutine[Any, Any, Result], is_input: Callable[[], bool]
    ) -> None:
        self._turns, self._work, self._is_input = turns, work, is_input

    def __await__(self) -> Generator[Any, Any, Result]:
        resume: Callable[[Any], Any] = self._work.send
        value: Any = None
        while True:
            try:
                pending = self._timed(resume, value) if self._is_input() else resume(value)
            except StopIteration as end:
                made: Result = end.value
                return made
            finally:
                value = None  # an exception that comes out again must not hold its own frames
            try:
                value = yield pending
                resume = self._work.send
            except GeneratorExit:  # dropped unfinished, by any thread
                self._work.close()
                raise
            except BaseException as error:
                resume, value = self._work.throw, error

    def _timed(self, resume: Callable[[Any], Any], value: Any) -> Any:
        self._turns.begin_step()
        try:
            return resume(value)
        finally:
            del value
            self._turns.end_step()
