"""The engine thread: loads the model, then steps the engine for as long as the server runs.

Rules
- Aborts and matched stops are taken from their rings before the submissions are. An abort is sent
  only after its request's acceptance was seen, which followed the submission's push; so an abort in
  hand means that its submission is in the ring now, and none ever comes before its request.
- Every submission is answered by one ending: of the engine's, or the error made here.

Knows no text and no sockets.
"""

import gc
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

import numpy as np

from engine.cache_outline import CacheOutline
from engine.core import EngineStats
from engine.errors import ModelError
from engine.request import Finish, Request, StepOutput
from engine.step_trace import StepRecord
from runtime.channel import Receiver, Sender
from runtime.detokenizer_thread import TextMaker
from runtime.inbox import Inbox, Wakeup
from runtime.latest import Latest
from runtime.lifecycle import Codec, GrammarSource
from runtime.messages import ModelFacts
from runtime.tokenizer_pool import Encoder
from runtime.worker import TICK_S, OperatorError, Pulse, Stopped

log = logging.getLogger(__name__)

SPIN_S: Final = 50e-6  # waking a sleeping thread takes about this long
_TIDY_EVERY_S: Final = 30.0
_STATS_EVERY_S: Final = 0.1  # while there is work; and once there is none


class ServedEngine(Protocol):
    """What is asked of `engine.core.Engine`."""

    @property
    def has_work(self) -> bool: ...

    def submit(self, request: Request) -> None: ...

    def abort(self, request_id: int) -> None: ...

    def stop_matched(self, request_id: int) -> None: ...

    def expire(self, now_s: float) -> None: ...

    def flush_cache(self) -> int: ...

    def outline_cache(self) -> CacheOutline: ...

    def last_steps(self, count: int) -> tuple[StepRecord, ...]: ...

    def step(self) -> StepOutput | None: ...

    def stats(self) -> EngineStats: ...

    def check_integrity(self) -> None: ...

    def close(self) -> None: ...


# Called with what is being done and, where it is known, how much of it is done (0 to 1).
Progress = Callable[[str, float | None], None]


class LoadedTokenizer(Encoder, Codec, Protocol):
    """What is asked of `engine.tokenizer.Tokenizer`, by tokenizer threads and others."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What loading gives the other threads; the engine itself stays where it was made."""

    facts: ModelFacts
    tokenizer: LoadedTokenizer
    detokenizer: TextMaker  # handed on to the detokenizer thread
    grammars: GrammarSource


Load = Callable[[Progress], tuple[ServedEngine, Loaded]]


@dataclass(frozen=True, slots=True)
class FlushCache:
    """A command to flush the prefix cache; its answer says how many pages came back."""

    number: int


@dataclass(frozen=True, slots=True)
class ReadSteps:
    """A command to tell of the last steps; its answer has their records."""

    number: int
    count: int


@dataclass(frozen=True, slots=True)
class OutlineCache:
    """A command to draw the prefix cache; its answer has the outline."""

    number: int


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a command."""

    number: int  # the command's
    pages: int = 0
    steps: tuple[StepRecord, ...] = ()
    outline: CacheOutline | None = None


Command = FlushCache | ReadSteps | OutlineCache


@dataclass(frozen=True, slots=True)
class EngineRings:
    """The engine thread's ends."""

    wakeup: Wakeup
    submissions: tuple[Receiver[Request], ...]  # one for each tokenizer thread
    aborts: tuple[Receiver[int], ...]  # one for each HTTP loop
    stops: Receiver[int]
    commands: tuple[Receiver[Command], ...]  # likewise
    answers: tuple[Sender[Answer], ...]
    outputs: Sender[StepOutput]
    loaded: Sender[Loaded]
    stats: Latest[EngineStats]


class EngineLoop:
    """Feeds and steps one engine. Owned by the engine thread."""

    def __init__(self, load: Load, progress: Progress, rings: EngineRings) -> None:
        self._load = load
        self._progress = progress
        self._rings = rings
        self._inbox = Inbox(
            rings.wakeup, [*rings.aborts, rings.stops, *rings.commands, *rings.submissions]
        )
        self._worked = False  # since the last tidying
        self._tidied_s = time.monotonic()
        self._told_stats_s = 0.0

    def run(self, pulse: Pulse) -> None:
        """The thread's body."""
        pulse.watched = False  # a file system or a compiler may be slow without being stuck
        try:
            engine, loaded = self._load(partial(self._report, pulse))
        except (ModelError, OSError) as error:
            raise OperatorError(f"the model cannot be loaded: {error}") from error
        try:
            self._tell_stats(engine)
            pulse.push(self._rings.loaded, loaded)
            pulse.watched = True
            while not pulse.is_stopping:
                self._turn(engine, pulse)
            engine.check_integrity()
        finally:
            engine.close()

    def _report(self, pulse: Pulse, doing: str, done: float | None) -> None:
        pulse.beat()
        if pulse.is_stopping:
            raise Stopped
        self._progress(doing, done)

    def _turn(self, engine: ServedEngine, pulse: Pulse) -> None:
        pulse.beat()
        if not (self._take_messages(engine, pulse) or engine.has_work):
            self._idle(engine)
            return
        self._worked = True
        output = engine.step()
        if output is not None:
            pulse.push(self._rings.outputs, output)
        now_s = time.monotonic()
        if now_s - self._told_stats_s >= _STATS_EVERY_S:
            self._tell_stats(engine)
            engine.expire(now_s)

    def _tell_stats(self, engine: ServedEngine) -> None:
        self._rings.stats.value = engine.stats()
        self._told_stats_s = time.monotonic()

    def _take_messages(self, engine: ServedEngine, pulse: Pulse) -> bool:
        """True where anything came: the engine may have an ending to tell, even without work."""
        rings = self._rings
        aborts = [request_id for ring in rings.aborts for request_id in ring.pop_all()]
        stops = rings.stops.pop_all()
        requests = [request for ring in rings.submissions for request in ring.pop_all()]
        for request in requests:
            self._submit(engine, request, pulse)
        for request_id in stops:
            engine.stop_matched(request_id)
        for request_id in aborts:
            engine.abort(request_id)
        for commands, answers in zip(rings.commands, rings.answers, strict=True):
            for command in commands.pop_all():
                pulse.push(answers, _obey(engine, command))
        return bool(aborts or stops or requests)

    def _submit(self, engine: ServedEngine, request: Request, pulse: Pulse) -> None:
        try:
            engine.submit(request)
        except ValueError as error:
            log.warning("request %d cannot be served: %s", request.id, error)
            pulse.push(self._rings.outputs, _refused(request.id, str(error)))

    def _idle(self, engine: ServedEngine) -> None:
        self._tell_stats(engine)
        self._inbox.wait(TICK_S, spin_s=SPIN_S)
        if self._inbox.is_empty and self._worked:
            self._tidy(engine)

    def _tidy(self, engine: ServedEngine) -> None:
        """What would disturb running requests; so it is done after them, and not often."""
        now_s = time.monotonic()
        if now_s - self._tidied_s >= _TIDY_EVERY_S:
            self._worked, self._tidied_s = False, now_s
            engine.check_integrity()
            gc.collect()


def _obey(engine: ServedEngine, command: Command) -> Answer:
    if isinstance(command, FlushCache):
        return Answer(command.number, pages=engine.flush_cache())
    if isinstance(command, OutlineCache):
        return Answer(command.number, outline=engine.outline_cache())
    return Answer(command.number, steps=engine.last_steps(command.count))


def _refused(request_id: int, message: str) -> StepOutput:
    return StepOutput(
        step=0,
        request_ids=np.array([request_id], np.int64),
        token_ids=np.array([-1], np.int32),
        finishes=np.array([Finish.ERROR], np.uint8),
        errors=((request_id, message),),
    )
