"""The rings between a server's threads, and how much each holds.

Why no circle of waiting threads can close: the HTTP loop never waits for room, and the detokenizer
not for matched stops. Every other ring leads from the tokenizers over the engine and the
detokenizer to the HTTP loop; who waits for room in one waits for a thread further on.

Why what they do not wait for has room: at most `max_requests` requests are alive, from submission
to their last word.
- Submissions: a request waits in one of these rings only while it is alive.
- Matched stops: whatever matches was with the engine when it last emptied the ring, so alive then.
- Commands of an admin and their answers: control.py sends no more than there is room.
- Aborts: whatever is in the ring is alive, or was when the engine last emptied the ring, and has
  since heard of an end that was under way.
"""

from typing import Any, Final

from engine.core import EngineStats
from engine.request import Request, StepOutput
from runtime.capacity.report import Capacity
from runtime.channel import Channel
from runtime.config import ServerConfig
from runtime.control import COMMANDS, ControlRings
from runtime.detokenizer_thread import DetokenizerRings
from runtime.engine_thread import Answer, Command, EngineRings, Loaded
from runtime.inbox import Inbox, Wakeup
from runtime.insight import InsightRings
from runtime.latest import Latest
from runtime.messages import ModelFacts, StepDeltas, Submission, Verdict
from runtime.monitor_thread import MonitorRings, Sample
from runtime.service import ServiceRings
from runtime.tokenizer_pool import TokenizerRings

_STEPS: Final = 256  # outputs or deltas under way: 1 s of steps at 4 ms each
_REQUESTS: Final = 1024


class Rings:
    """Every ring and wake-up of a server. Owned by the main thread, which gives the ends away."""

    def __init__(self, config: ServerConfig) -> None:
        every_request = config.max_requests
        pool = range(config.tokenizer_threads)
        self.main, self.http = Wakeup(), Wakeup()
        self.engine, self.detokenizer, self.control = Wakeup(), Wakeup(), Wakeup()
        self.monitor, self.ranks = Wakeup(), Wakeup()
        self.tokenizers = [Wakeup() for _ in pool]
        self.loaded = Channel[Loaded](1, self.main)
        self.submissions = [Channel[Submission](every_request, self.tokenizers[k]) for k in pool]
        self.requests = [Channel[Request](_REQUESTS, self.engine) for _ in pool]
        self.verdicts = [Channel[Verdict](_REQUESTS, self.http) for _ in pool]
        self.aborts = Channel[int](2 * every_request, self.engine)
        self.stops = Channel[int](every_request, self.engine)
        self.commands = Channel[Command](COMMANDS, self.engine)
        self.answers = Channel[Answer](COMMANDS, self.control)
        self.outputs = Channel[StepOutput](_STEPS, self.detokenizer)
        self.deltas = Channel[StepDeltas](_STEPS, self.http)
        self.stats = Latest[EngineStats]()
        self.capacity = Latest[Capacity]()
        self.sample = Latest[Sample]()
        self.facts = Latest[ModelFacts]()

    @property
    def wakeups(self) -> list[Wakeup]:
        return [
            self.main, self.http, self.control, self.engine, self.detokenizer, self.monitor,
            self.ranks, *self.tokenizers,
        ]  # fmt: skip

    def of_service(self) -> ServiceRings:
        return ServiceRings(
            submissions=tuple(ring.sender for ring in self.submissions),
            verdicts=tuple(ring.receiver for ring in self.verdicts),
            deltas=self.deltas.receiver,
            aborts=self.aborts.sender,
            stats=self.stats,
        )

    def of_http(self) -> Inbox:
        return Inbox(self.http, [self.deltas.receiver, *(ring.receiver for ring in self.verdicts)])

    def of_control(self) -> ControlRings:
        return ControlRings(self.control, self.commands.sender, self.answers.receiver)

    def of_monitor(self) -> MonitorRings:
        return MonitorRings(self.monitor, self.stats, self.capacity, self.sample)

    def of_insight(self) -> InsightRings:
        return InsightRings(self.stats, self.capacity, self.sample, self.facts, self.depths)

    def depths(self) -> dict[str, int]:
        """About how many items each ring between threads holds. Safe from any thread."""
        rings: dict[str, list[Channel[Any]]] = {
            "submissions": [*self.submissions], "requests": [*self.requests],
            "verdicts": [*self.verdicts], "aborts": [self.aborts], "stops": [self.stops],
            "outputs": [self.outputs], "deltas": [self.deltas],
        }  # fmt: skip
        return {name: sum(ring.depth for ring in several) for name, several in rings.items()}

    def of_engine(self) -> EngineRings:
        return EngineRings(
            wakeup=self.engine,
            submissions=tuple(ring.receiver for ring in self.requests),
            aborts=self.aborts.receiver,
            stops=self.stops.receiver,
            commands=self.commands.receiver,
            answers=self.answers.sender,
            outputs=self.outputs.sender,
            loaded=self.loaded.sender,
            stats=self.stats,
        )

    def of_detokenizer(self) -> DetokenizerRings:
        return DetokenizerRings(
            wakeup=self.detokenizer,
            outputs=self.outputs.receiver,
            stops=self.stops.sender,
            deltas=self.deltas.sender,
        )

    def of_tokenizer(self, index: int) -> TokenizerRings:
        return TokenizerRings(
            wakeup=self.tokenizers[index],
            submissions=self.submissions[index].receiver,
            requests=self.requests[index].sender,
            verdicts=self.verdicts[index].sender,
        )
