"""The detokenizer thread: each step's tokens become text on its way to the HTTP loop.

One push, and so at most one wake-up, a step. Knows no sockets; how text is made is
engine.detokenizer's business.
"""

from dataclasses import dataclass
from typing import Protocol

from engine.request import Delta, Started, StepOutput
from runtime.channel import Receiver, Sender
from runtime.inbox import Inbox, Wakeup
from runtime.messages import Begun, StepDeltas
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
    deltas: Sender[StepDeltas]


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
            begun = tuple(map(_begun, output.started)) if output.started else ()
            pulse.push(self._rings.deltas, StepDeltas(text.deltas, begun, output.made_s))


def _begun(started: Started) -> Begun:
    request = started.request
    return Begun(request.id, len(request.prompt_ids), started.queued_s, started.begun_s)
