"""What the HTTP routes ask of the rest of the server.

`runtime` implements these Protocols over its threads; tests implement them with fakes. Every method
is called on the HTTP loop and none blocks it.
"""

import enum
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.grammar.spec import GrammarSpec
from engine.request import Delta, Prompt, SamplingParams
from httpd.parsing.formats import Formats


class State(enum.Enum):
    """Whether the API answers."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class ModelCard:
    """The served model, and the limits that validation needs."""

    id: str
    created: int  # unix seconds
    max_model_len: int  # prompt + output, tokens
    vocab_size: int  # ids below it are valid in a prompt
    has_chat_template: bool
    formats: Formats = Formats()


@dataclass(frozen=True, slots=True)
class Occupancy:
    """What requests held a moment ago; at rest no row, and every page is available."""

    requests: int  # that are not over, wherever in the server they are
    running: int  # that hold a row and pages
    waiting: int  # for a row
    available_pages: int  # of the KV cache: free, or kept only for a prompt that may come again
    total_pages: int
    host_cached_pages: int = 0  # of the prefix cache, in host memory
    host_total_pages: int = 0


class Rejected(Exception):
    """A request that is refused before its first byte; carries an OpenAI error body's fields."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        type: str = "invalid_request_error",
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message = status, message
        self.param, self.code, self.type = param, code, type
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class Constraint:
    """What an output must be, and which field of the body asks for it."""

    spec: GrammarSpec
    param: str


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt, and what is to be made of it: a generation for each of `params`."""

    prompt: Prompt
    params: tuple[SamplingParams, ...]  # at least one; all of the same max_new_tokens
    # False: max_new_tokens is a default, and is cut to what the context leaves. True: what does
    # not fit is refused.
    max_tokens_given: bool
    constraint: Constraint | None = None  # None: any text
    namespace: str = ""  # jobs of one namespace share prefixes, and no others


class Generation(Protocol):
    """One accepted request on its way. Owned by its HTTP loop."""

    prompt_tokens: int

    def __aiter__(self) -> AsyncIterator[Delta]:
        """Deltas in order, those that piled up merged into one; ends after one with a `finish`, or
        after `abort`."""
        ...

    def abort(self) -> None:
        """The client is gone: give its row and pages back. Does nothing once it has finished."""
        ...

    def end(self) -> None:
        """The server wants it ended: its last delta will say so. Does nothing once it has one."""
        ...


class Service(Protocol):
    """The server behind the routes."""

    def state(self) -> State: ...

    def gil_enabled(self) -> bool: ...

    def model(self) -> ModelCard:
        """Only after `state()` is READY."""
        ...

    def occupancy(self) -> Occupancy | None:
        """None before the model is loaded."""
        ...

    async def submit(self, job: Job) -> Sequence[Generation]:
        """Tokenizes the job's prompt and queues its generations.

        Raises `Rejected`: context_length_exceeded, an empty prompt, ids out of the vocabulary, a
        template that raises, a grammar that cannot be used; 503 for a full queue, too many grammars
        at a time, and outside of READY.
        If the caller is cancelled while it waits, all are aborted.
        """
        ...

    async def tokenize(self, prompt: Prompt) -> tuple[int, ...]:
        """The prompt's token ids. Raises `Rejected` as `submit` does, but for its length."""
        ...

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """The text of these ids, which are in the vocabulary. Raises `Rejected` (500, 503)."""
        ...

    async def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """How the vocabulary writes each of these ids. Raises `Rejected` (500, 503)."""
        ...
