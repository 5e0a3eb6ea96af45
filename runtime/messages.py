"""The values that travel between the HTTP loops, tokenizers, detokenizer and the main thread.

What the engine and the detokenizer exchange is in engine.request. All are frozen.
"""

from dataclasses import dataclass, field

from engine.request import CompiledGrammar, Delta, Started
from httpd.service import Job, ModelCard


@dataclass(frozen=True, slots=True)
class Submission:
    """A job on its way to a tokenizer thread: one request for each of its params."""

    ids: tuple[int, ...]  # as many as params
    job: Job
    arrived_s: float  # time.monotonic()
    grammar: CompiledGrammar | None = None  # of the job's constraint


@dataclass(frozen=True, slots=True)
class Accepted:
    """The requests were sent to the engine."""

    ids: tuple[int, ...]
    prompt_tokens: int
    encoded_s: float = field(default=0.0, compare=False)  # time.monotonic()


@dataclass(frozen=True, slots=True)
class Refused:
    """The requests go no further; the fields of `httpd.service.Rejected`."""

    ids: tuple[int, ...]
    status: int
    message: str
    param: str | None = None
    code: str | None = None


Verdict = Accepted | Refused


@dataclass(frozen=True, slots=True)
class StepDeltas:
    """What one step adds to its responses."""

    deltas: tuple[Delta, ...]
    started: tuple[Started, ...] = ()  # those whose first delta is among them
    made_s: float = 0.0  # time.monotonic() when the engine had the step's tokens


@dataclass(frozen=True, slots=True)
class Abort:
    """A command to an HTTP loop: to end its responses."""

    number: int  # of all commands of the loop that gives it
    response_id: str | None  # None: all of them


@dataclass(frozen=True, slots=True)
class Done:
    """What came of an `Abort`."""

    number: int  # the command's
    count: int  # responses that were ended


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the engine thread tells of the model that it has loaded."""

    card: ModelCard
    kv_tokens: int  # capacity of the KV pool
    device: str
    dtype: str
    rank_sums: str = ""  # of several ranks: fused with norms, or apart
