"""The rings between a server's threads, and how much each holds.

Why no circle of waiting threads can close: an HTTP loop never waits for room, and the detokenizer
not for matched stops. Every other ring leads from the tokenizers over the engine and the
detokenizer to the HTTP loops; who waits for room in one waits for a thread further on.

Why what they do not wait for has room: at most `max_requests` requests are alive, from submission
to their last word, and all of them may be one HTTP loop's.
- Submissions: a request waits in one of these rings only while it is alive.
- Matched stops: whatever matches was with the engine when it last emptied the ring, so alive then.
- Commands of an admin and their answers: control.py sends no more than there is room.
- Aborts: whatever is in the ring is alive, or was when the engine last emptied the ring, and has
  since heard of an end that was under way.
"""

from collections.abc import Iterable
from itertools import chain
from typing import Any, Final

from engine.core import EngineStats
from engine.request import Request, StepOutput
from runtime.capacity.report import Capacity
from runtime.channel import Channel
from runtime.config import ServerConfig
from runtime.control import COMMANDS, ControlRings, Line
from runtime.detokenizer_thread import DetokenizerRings
from runtime.engine_thread import Answer, Command, EngineRings, Loaded
from runtime.inbox import Inbox, Wakeup
from runtime.insight import InsightRings
from runtime.latest import Latest
from runtime.messages import Abort, Done, ModelFacts, StepDeltas, Submission, Verdict
from runtime.monitor_thread import MonitorRings, Sample
from runtime.request_ids import request_ids
from runtime.service import ServiceRings
from runtime.tokenizer_pool import TokenizerRings

_STEPS: Final = 256  # outputs or deltas under way: 1 s of steps at 4 ms each
_REQUESTS: Final = 1024


class Rings:
    """Every ring and wake-up of a server. Owned by the main thread, which gives the ends away."""

    def __init__(self, config: ServerConfig) -> None:
        every_request = config.max_requests
        loops, pool = range(config.http_loops), range(config.tokenizer_threads)
        self.main, self.engine, self.detokenizer = Wakeup(), Wakeup(), Wakeup()
        self.http = [Wakeup() for _ in loops]
        self.control = [Wakeup() for _ in loops]
        self.monitor, self.ranks = Wakeup(), Wakeup()
        self.tokenizers = [Wakeup() for _ in pool]
        self.loaded = Channel[Loaded](1, self.main)
        # By HTTP loop, then by tokenizer thread.
        self.submissions = [
            [Channel[Submission](every_request, self.tokenizers[k]) for k in pool] for _ in loops
        ]
        self.verdicts = [[Channel[Verdict](_REQUESTS, self.http[i]) for _ in pool] for i in loops]
        self.requests = [Channel[Request](_REQUESTS, self.engine) for _ in pool]
        self.aborts = [Channel[int](2 * every_request, self.engine) for _ in loops]
        self.stops = Channel[int](every_request, self.engine)
        self.commands = [Channel[Command](COMMANDS, self.engine) for _ in loops]
        self.answers = [Channel[Answer](COMMANDS, self.control[i]) for i in loops]
        # By the loop that commands, then by the one that does it.
        self.orders = [[Channel[Abort](COMMANDS, self.http[j]) for j in loops] for _ in loops]
        self.done = [[Channel[Done](COMMANDS, self.control[i]) for _ in loops] for i in loops]
        self.outputs = Channel[StepOutput](_STEPS, self.detokenizer)
        self.deltas = [Channel[StepDeltas](_STEPS, self.http[i]) for i in loops]
        self.stats = Latest[EngineStats]()
        self.capacity = Latest[Capacity]()
        self.sample = Latest[Sample]()
        self.facts = Latest[ModelFacts]()

    @property
    def wakeups(self) -> list[Wakeup]:
        return [
            self.main, *self.http, *self.control, self.engine, self.detokenizer, self.monitor,
            self.ranks, *self.tokenizers,
        ]  # fmt: skip

    def of_service(self, loop: int) -> ServiceRings:
        return ServiceRings(
            ids=request_ids(loop, len(self.http)),
            submissions=tuple(ring.sender for ring in self.submissions[loop]),
            verdicts=tuple(ring.receiver for ring in self.verdicts[loop]),
            deltas=self.deltas[loop].receiver,
            aborts=self.aborts[loop].sender,
            stats=self.stats,
        )

    def of_http(self, loop: int) -> Inbox:
        orders = [of_one[loop].receiver for of_one in self.orders]
        verdicts = [ring.receiver for ring in self.verdicts[loop]]
        return Inbox(self.http[loop], [self.deltas[loop].receiver, *verdicts, *orders])

    def of_control(self, loop: int) -> ControlRings:
        to_loops = zip(self.orders[loop], self.done[loop], strict=True)
        orders = [of_one[loop].receiver for of_one in self.orders]
        done = [to_one[loop].sender for to_one in self.done]
        return ControlRings(
            wakeup=self.control[loop],
            engine=Line(self.commands[loop].sender, self.answers[loop].receiver),
            loops=tuple(Line(there.sender, back.receiver) for there, back in to_loops),
            commands=tuple(zip(orders, done, strict=True)),
        )

    def of_monitor(self) -> MonitorRings:
        return MonitorRings(self.monitor, self.stats, self.capacity, self.sample)

    def of_insight(self) -> InsightRings:
        return InsightRings(self.stats, self.capacity, self.sample, self.facts, self.depths)

    def depths(self) -> dict[str, int]:
        """About how many items each ring between threads holds. Safe from any thread."""
        rings: dict[str, Iterable[Channel[Any]]] = {
            "submissions": chain(*self.submissions), "requests": self.requests,
            "verdicts": chain(*self.verdicts), "aborts": self.aborts, "stops": [self.stops],
            "outputs": [self.outputs], "deltas": self.deltas,
        }  # fmt: skip
        return {name: sum(ring.depth for ring in several) for name, several in rings.items()}

    def of_engine(self) -> EngineRings:
        return EngineRings(
            wakeup=self.engine,
            submissions=tuple(ring.receiver for ring in self.requests),
            aborts=tuple(ring.receiver for ring in self.aborts),
            stops=self.stops.receiver,
            commands=tuple(ring.receiver for ring in self.commands),
            answers=tuple(ring.sender for ring in self.answers),
            outputs=self.outputs.sender,
            loaded=self.loaded.sender,
            stats=self.stats,
        )

    def of_detokenizer(self) -> DetokenizerRings:
        return DetokenizerRings(
            wakeup=self.detokenizer,
            outputs=self.outputs.receiver,
            stops=self.stops.sender,
            deltas=tuple(ring.sender for ring in self.deltas),
        )

    def of_tokenizer(self, index: int) -> TokenizerRings:
        return TokenizerRings(
            wakeup=self.tokenizers[index],
            submissions=tuple(of_loop[index].receiver for of_loop in self.submissions),
            requests=self.requests[index].sender,
            verdicts=tuple(of_loop[index].sender for of_loop in self.verdicts),
        )
