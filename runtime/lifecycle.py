"""What phase the server is in, what the API has of the model once it is READY, the one failure
that ended it, and how it ended.

Rules
- Phases only move forward: LOADING → READY → DRAINING → stopped, and FAILED from anywhere.
- Whoever changes the phase signals every subscribed wake-up afterwards, so a thread that sleeps
  looks at the phase within moments. Knows nothing of threads, requests or signals.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from engine.grammar.spec import GrammarSpec
from engine.request import CompiledGrammar, Int32Array, Prompt
from httpd.service import ModelCard, State
from runtime.inbox import Wakeup

# Which states may follow each.
_NEXT: Final = {
    State.LOADING: (State.READY, State.DRAINING, State.FAILED),
    State.READY: (State.DRAINING, State.FAILED),
    State.DRAINING: (State.FAILED,),
    State.FAILED: (),
}


@dataclass(frozen=True, slots=True)
class Failure:
    """Why the server ends."""

    thread: str
    cause: str  # one line; the stack is in the log
    is_hang: bool = False  # nobody raised anything: the threads' stacks are yet to be looked at


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a server ended."""

    exit_code: int
    all_ended: bool  # False: a thread still runs, and the process must be ended around it


class GrammarSource(Protocol):
    """What is asked of `engine.grammar.on_demand.GrammarsOnDemand`. Safe from any thread."""

    def try_known(self, spec: GrammarSpec) -> CompiledGrammar | None:
        """What `compile` gives, where it would take no time; None where it would.

        Raises `engine.grammar.spec.GrammarError`.
        """
        ...

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """May take seconds. Raises `engine.grammar.spec.GrammarError`."""
        ...

    def close(self) -> None: ...


class Codec(Protocol):
    """What is asked of `engine.tokenizer.Tokenizer` where nothing is generated.

    Safe from any thread.
    """

    def encode_prompt(self, prompt: Prompt) -> Int32Array:
        """May take seconds. Raises PromptError."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """How the vocabulary writes each id."""
        ...


class Lifecycle:
    """The server's phase, and its model for the API. Safe from any thread.

    Readers take single attributes without the lock: each is replaced whole (library/threadsafety).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._state = State.LOADING  # guarded by _lock
        self._stopping = False  # guarded by _lock
        self._card: ModelCard | None = None  # guarded by _lock
        self._grammars: GrammarSource | None = None  # guarded by _lock
        self._codec: Codec | None = None  # guarded by _lock
        self._failure: Failure | None = None  # guarded by _lock
        self._wakeups: tuple[Wakeup, ...] = ()  # guarded by _lock

    @property
    def state(self) -> State:
        return self._state

    @property
    def is_stopping(self) -> bool:
        """True once every thread but the main one is to return."""
        return self._stopping

    @property
    def card(self) -> ModelCard | None:
        """The served model, None before READY."""
        return self._card

    @property
    def grammars(self) -> GrammarSource | None:
        """What compiles grammars, None before READY."""
        return self._grammars

    @property
    def codec(self) -> Codec | None:
        """What turns text to ids and back, None before READY."""
        return self._codec

    @property
    def failure(self) -> Failure | None:
        """What ended the server, None outside of FAILED."""
        return self._failure

    def subscribe(self, wakeup: Wakeup) -> None:
        """Signals `wakeup` at each change from now on; it must stay open as long as any thread."""
        with self._lock:
            self._wakeups += (wakeup,)

    def ready(self, card: ModelCard, grammars: GrammarSource, codec: Codec) -> bool:
        """Opens the API; False where the server is already on its way out."""
        with self._lock:
            if State.READY not in _NEXT[self._state]:
                return False
            self._card, self._grammars, self._codec = card, grammars, codec
            self._state = State.READY
        self._signal()
        return True

    def drain(self) -> None:
        """Lets running requests end and takes no new ones. Does nothing once that began."""
        with self._lock:
            if State.DRAINING not in _NEXT[self._state]:
                return
            self._state = State.DRAINING
        self._signal()

    def stop(self) -> None:
        """Has every thread return."""
        with self._lock:
            self._stopping = True
        self._signal()

    def fail(self, failure: Failure) -> bool:
        """Ends the server; False where an earlier failure already does, whose word counts."""
        with self._lock:
            if State.FAILED not in _NEXT[self._state]:
                return False
            self._failure = failure
            self._state = State.FAILED
        self._signal()
        return True

    def _signal(self) -> None:
        for wakeup in self._wakeups:
            wakeup.signal()
