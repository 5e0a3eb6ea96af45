"""The values that travel between HTTP, tokenizer, engine and detokenizer.

All are frozen: a value may be read by any thread once it was sent through a channel, and nobody
writes it again. This module imports neither torch nor any other part of the engine: `httpd` may
import it.
"""

import enum
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

_SEEDS: Final = 1 << 64

# Below these, float32 arithmetic would overflow on its way to what is meant: the likeliest token.
_GREEDY_BELOW: Final = 1e-5  # temperature
_LEAST_TOP_P: Final = 1e-6

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]


class Finish(enum.IntEnum):
    """Why a request ended; `NONE` while it runs."""

    NONE = 0
    STOP = 1  # an EOS id, a stop token id or a stop string
    LENGTH = 2  # max_new_tokens or the context is used up
    ABORT = 3  # the client left, or an operator asked for it
    ERROR = 4  # this request alone could not be served
    TIMEOUT = 5  # it waited or ran for too long
    UNSATISFIABLE = 6  # nothing meets all that it asks for


# Ends that come with a message for the client.
FAILURES: Final = frozenset({Finish.ERROR, Finish.TIMEOUT, Finish.UNSATISFIABLE})


@dataclass(frozen=True, slots=True)
class ReasoningMarkers:
    """How a model marks what it thinks before it answers."""

    opening: str  # neither is empty, nor begins or ends with whitespace
    closing: str
    always: bool = False  # the output begins inside, whatever the prompt


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request's tokens are chosen, and when it starts and ends.

    Whoever takes one from outside checks it: `engine.sampling_limits` has the limits.
    """

    max_new_tokens: int  # 0 only scores the prompt
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 is off
    top_p: float = 1.0  # 1 is off
    min_p: float = 0.0  # 0 is off
    seed: int | None = None  # any int64; None draws a fresh one at submission
    stop: tuple[str, ...] = ()  # looked for in content alone
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False  # without effect where a grammar says what comes: an EOS ends it
    skip_special_tokens: bool = True
    include_stop: bool = False  # the stop string or stop token that ends the text is part of it
    # Before as many no EOS, stop token or stop string ends it; a grammar that is complete does.
    min_tokens: int = 0
    presence_penalty: float = 0.0  # subtracted from logits of ids that are in the output
    frequency_penalty: float = 0.0  # likewise, times how often
    repetition_penalty: float = 1.0  # above 1: against ids of the prompt and the output
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what is added to its logit)
    allowed_token_ids: tuple[int, ...] | None = None  # None is all
    bad_words: tuple[str, ...] = ()  # whose tokens the output does not have one after the other
    echo: bool = False  # the text begins with the prompt's
    logprobs: int | None = None  # likeliest ids told of each new token; 0: the token's own alone
    prompt_logprobs: int | None = None  # likewise of each prompt token
    thinking_budget: int | None = None  # tokens of reasoning; None is any number
    reasoning: ReasoningMarkers | None = None  # split off; None: all text is content
    priority: int = 0  # higher starts first, where the policy is by priority
    routing_key: str = ""  # requests of one key start together, where the policy is by key

    def settled(self, vocab_size: int) -> "SamplingParams":
        """The same, where a number too small or too large to matter is the limit that it means."""
        return replace(
            self,
            temperature=self.temperature if self.temperature >= _GREEDY_BELOW else 0.0,
            top_k=self.top_k if 0 < self.top_k < vocab_size else 0,
            top_p=max(self.top_p, _LEAST_TOP_P),
        )

    def draw_seed(self) -> int:
        """The seed for one request: this one's own, or one drawn now; in [0, 2**64)."""
        return secrets.randbelow(_SEEDS) if self.seed is None else self.seed % _SEEDS


# Types of the parts of a message's content that are text; a part has it under its type's name.
TEXT_PARTS: Final = ("text", "refusal")


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Messages to be rendered by the model's chat template (plain JSON values)."""

    messages: tuple[dict[str, Any], ...]
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    continue_final: bool = False  # the answer goes on where the last message's text ends
    opens_answer: bool = True  # it ends where the assistant's answer begins


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Text to be encoded as it is."""

    text: str
    add_special_tokens: bool = True  # those that the tokenizer puts around a text


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids given by the client."""

    token_ids: tuple[int, ...]


Prompt = ChatPrompt | TextPrompt | TokenPrompt


class Matcher(Protocol):
    """Where one output stands in its grammar. Owned by the engine thread."""

    def fill_mask(self, row: Int32Array) -> None:
        """Sets bit i % 32 of row[i // 32] for each id i that may come next, at least one, and
        clears the others.

        row  [ceil(vocabulary / 32)] int32

        An id that ends the request is among them where the output may end, and only there. Raises
        `engine.errors.MatchError`.
        """
        ...

    def accept(self, token_id: int) -> bool:
        """Takes the next token; False where the grammar has no place for it."""
        ...


class CompiledGrammar(Protocol):
    """What an output must be. Safe from any thread: nobody writes it."""

    def matcher(self, stop_ids: Sequence[int]) -> Matcher:
        """A matcher at the beginning; `stop_ids` end the request."""
        ...


@dataclass(frozen=True, slots=True)
class Thinking:
    """The tokens around a model's reasoning, and how much of it there may be."""

    opening_id: int
    closing_id: int
    budget: int | None = None  # tokens of reasoning; then it is closed


@dataclass(frozen=True, slots=True)
class Request:
    """One generation, tokenized and validated, as the engine takes it."""

    id: int  # unique in this process; never the client's own id
    prompt_ids: Int32Array  # [prompt tokens], at least one, no longer written
    params: SamplingParams
    seed: int  # params.seed, or the one drawn for it; 0 <= seed < 2**64
    namespace: str = ""  # prefixes are shared only inside one namespace
    arrived_s: float = 0.0  # time.monotonic() when the server saw it
    grammar: CompiledGrammar | None = None  # of what comes behind reasoning, if there is any
    thinking: Thinking | None = None  # None: a grammar begins with the first token
    begins_reasoning: bool = False  # the output begins inside reasoning
    bad_sequences: tuple[tuple[int, ...], ...] = ()  # of params.bad_words; none is empty

    @property
    def priority(self) -> int:
        return self.params.priority

    @property
    def routing_key(self) -> str:
        return self.params.routing_key


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities of n tokens under the model itself: before penalties and temperature."""

    chosen: NDArray[np.float32]  # [n]
    ranks: Int32Array  # [n], 1 for the likeliest
    top_ids: Int32Array  # [n, k] the likeliest ids, the likeliest first
    top: NDArray[np.float32]  # [n, k]

    def of_token(self, index: int, k: int) -> "Logprobs":
        """Of one token, with its k likeliest ids."""
        part = slice(index, index + 1)
        top_ids, top = self.top_ids[part, :k], self.top[part, :k]
        return Logprobs(self.chosen[part], self.ranks[part], top_ids, top)

    @classmethod
    def joined(cls, parts: Sequence["Logprobs"]) -> "Logprobs":
        """One after the other; at least one, all of the same k."""
        return cls(
            np.concatenate([part.chosen for part in parts]),
            np.concatenate([part.ranks for part in parts]),
            np.concatenate([part.top_ids for part in parts]),
            np.concatenate([part.top for part in parts]),
        )


@dataclass(frozen=True, slots=True)
class Started:
    """A request got its first token: what the detokenizer must know before that token."""

    request: Request
    cached_tokens: int  # prompt tokens whose KV came from the prefix cache
    prompt_logprobs: Logprobs | None = None  # of all prompt tokens but the first, where asked for
    queued_s: float = 0.0  # time.monotonic() when it came to the engine
    begun_s: float = 0.0  # likewise, when it first got a row: its prefill begins
    host_tokens: int = 0  # of cached_tokens: from its tier in host memory


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one committed step tells the detokenizer. The three arrays are parallel.

    request_ids  [n] int64
    token_ids    [n] int32, -1 where a request ended without a new token (abort, error, timeout)
    finishes     [n] uint8, a `Finish` each
    """

    step: int
    request_ids: Int64Array
    token_ids: Int32Array
    finishes: NDArray[np.uint8]
    started: tuple[Started, ...] = ()
    errors: tuple[tuple[int, str], ...] = ()  # (request id, message) of each of the FAILURES
    logprobs: tuple[tuple[int, Logprobs], ...] = ()  # (request id, of its one token), where asked
    made_s: float = 0.0  # time.monotonic() when the host had the tokens


@dataclass(frozen=True, slots=True)
class TokenText:
    """One token as a client sees it."""

    token_id: int
    text: str  # U+FFFD for what is no whole character
    utf8: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenScore:
    """One token of a response or a prompt, and the likeliest ones at its place."""

    token: TokenText
    rank: int  # 1 for the likeliest
    top: tuple[TokenText, ...]  # the likeliest first


@dataclass(frozen=True, slots=True)
class PromptText:
    """The prompt of a response, with `echo` or prompt logprobs."""

    text: str
    first: TokenText  # nothing precedes it: its logprob is NaN
    scores: tuple[TokenScore, ...]  # of all tokens but the first; empty where not asked for


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step adds to one response: the detokenizer's word to the HTTP loop."""

    request_id: int
    text: str  # new content that may be sent now; "" while text is held back
    token_ids: tuple[int, ...]  # ids behind it since the last delta, the ending EOS included
    finish: Finish
    completion_tokens: int  # so far
    cached_tokens: int
    stop_match: str | int | None = None  # the stop string or token id that ended it
    error: str | None = None
    reasoning: str = ""  # new text of it that may be sent now; it goes before `text`
    reasoning_tokens: int = 0  # of completion_tokens: those of reasoning and its markers
    host_tokens: int = 0  # of cached_tokens: from the cache's tier in host memory
    # Where asked for: of the tokens whose text in the content begins to be told; in the end also of
    # those without text. Tokens of reasoning and of a stop string that is cut off have none.
    scores: tuple[TokenScore, ...] = ()
    ending: TokenScore | None = None  # likewise: of the id that ended it and is no part of the text
    prompt: PromptText | None = None  # with the first delta, where asked for
