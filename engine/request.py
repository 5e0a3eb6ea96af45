"""The values that travel between HTTP, tokenizer, engine and detokenizer.

All are frozen: a value may be read by any thread once it was sent through a channel, and nobody
writes it again. This module imports neither torch nor any other part of the engine; it is the one
module of the engine that `httpd` may import.
"""

import enum
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]


class Finish(enum.IntEnum):
    """Why a request ended; `NONE` while it runs."""

    NONE = 0
    STOP = 1  # an EOS id, a stop token id or a stop string
    LENGTH = 2  # max_new_tokens or the context is used up
    ABORT = 3  # the client left, or an operator asked for it
    ERROR = 4  # this request alone could not be served


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request's tokens are chosen and when it ends. Validated by whoever builds it."""

    max_new_tokens: int
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 is off
    top_p: float = 1.0  # 1 is off
    min_p: float = 0.0  # 0 is off
    seed: int | None = None  # any int64; None draws a fresh one at submission
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Messages to be rendered by the model's chat template (plain JSON values)."""

    messages: tuple[dict[str, Any], ...]
    template_kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Text to be encoded as it is."""

    text: str


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids given by the client."""

    token_ids: tuple[int, ...]


Prompt = ChatPrompt | TextPrompt | TokenPrompt


@dataclass(frozen=True, slots=True)
class Request:
    """One generation, tokenized and validated, as the engine takes it."""

    id: int  # unique in this process; never the client's own id
    prompt_ids: Int32Array  # [prompt tokens], at least one, no longer written
    params: SamplingParams
    seed: int  # params.seed, or the one drawn for it; 0 <= seed < 2**64
    namespace: str = ""  # prefixes are shared only inside one namespace
    arrived_s: float = 0.0  # time.monotonic() when the server saw it


@dataclass(frozen=True, slots=True)
class Started:
    """A request got its first token: what the detokenizer must know before that token."""

    request: Request
    cached_tokens: int  # prompt tokens whose KV came from the prefix cache


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one committed step tells the detokenizer. The three arrays are parallel.

    request_ids  [n] int64
    token_ids    [n] int32, -1 where a request ended without a new token (abort, error)
    finishes     [n] uint8, a `Finish` each
    """

    step: int
    request_ids: Int64Array
    token_ids: Int32Array
    finishes: NDArray[np.uint8]
    started: tuple[Started, ...] = ()
    errors: tuple[tuple[int, str], ...] = ()  # (request id, message) for each Finish.ERROR


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step adds to one response: the detokenizer's word to the HTTP loop."""

    request_id: int
    text: str  # new text that may be sent now; "" while text is held back
    token_ids: tuple[int, ...]  # ids behind it since the last delta, the ending EOS included
    finish: Finish
    completion_tokens: int  # so far
    cached_tokens: int
    stop_match: str | int | None = None  # the stop string or token id that ended it
    error: str | None = None
