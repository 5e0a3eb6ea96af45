"""The detokenizer thread: each step's tokens become text on its way to the HTTP loops.

One push, and so at most one wake-up, a step and loop. Knows no sockets; how text is made is
engine.detokenizer's business.
"""

from dataclasses import dataclass
from typing import Protocol

from engine.request import Delta, Started, StepOutput
from runtime.channel import Receiver, Sender
from runtime.inbox import Inbox, Wakeup
from runtime.messages import StepDeltas
from runtime.request_ids import loop_of
from runtime.worker import TICK_S, Pulse


class StepText(Protocol):
    """What a step adds to its responses."""

    @property
    def deltas(self) -> tuple[Delta, ...]:
        """Each end among them, an abort's too: its route lives until it hears of it."""
        ...

    @property
    def stop_matched(self) -> tuple[int, ...]:
        """Requests whose stop string was found: ended for their clients, not yet for the engine."""
        ...


class TextMaker(Protocol):
    """What is asked of `engine.detokenizer.Detokenizer`. Owned by the detokenizer thread."""

    def on_step(self, output: StepOutput) -> StepText: ...


@dataclass(frozen=True, slots=True)
class DetokenizerRings:
    """The detokenizer thread's ends."""

    wakeup: Wakeup
    outputs: Receiver[StepOutput]
    stops: Sender[int]  # holds every live request at once, so that it is never full: see rings.py
    deltas: tuple[Sender[StepDeltas], ...]  # one for each HTTP loop


class DetokenizerLoop:
    """Turns outputs into deltas. Owned by the detokenizer thread."""

    def __init__(self, text_maker: TextMaker, rings: DetokenizerRings) -> None:
        self._text_maker = text_maker
        self._rings = rings
        self._inbox = Inbox(rings.wakeup, [rings.outputs])

    def run(self, pulse: Pulse) -> None:
        """The thread's body."""
        while not pulse.is_stopping:
            pulse.beat()
            outputs = self._rings.outputs.pop_all()
            if not outputs:
                self._inbox.wait(TICK_S)
            for output in outputs:
                self._tell(output, pulse)

    def _tell(self, output: StepOutput, pulse: Pulse) -> None:
        text = self._text_maker.on_step(output)
        for request_id in text.stop_matched:
            pulse.push(self._rings.stops, request_id)
        if text.deltas:
            self._push(StepDeltas(text.deltas, output.started, output.made_s), pulse)

    def _push(self, step: StepDeltas, pulse: Pulse) -> None:
        """To each loop what its requests are told."""
        loops = len(self._rings.deltas)
        if loops == 1:
            pulse.push(self._rings.deltas[0], step)
            return
        deltas: list[list[Delta]] = [[] for _ in range(loops)]
        started: list[list[Started]] = [[] for _ in range(loops)]
        for delta in step.deltas:
            deltas[loop_of(delta.request_id, loops)].append(delta)
        for each in step.started:
            started[loop_of(each.request.id, loops)].append(each)
        for loop, ring in enumerate(self._rings.deltas):
            if deltas[loop]:
                part = StepDeltas(tuple(deltas[loop]), tuple(started[loop]), step.made_s)
                pulse.push(ring, part)
