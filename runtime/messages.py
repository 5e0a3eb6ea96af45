"""The values that travel between the HTTP loop, the tokenizer threads and the main thread.

What the engine and the detokenizer exchange is in engine.request. All are frozen.
"""

from dataclasses import dataclass

from engine.request import Prompt, SamplingParams
from httpd.service import ModelCard


@dataclass(frozen=True, slots=True)
class Submission:
    """A checked request on its way to a tokenizer thread."""

    id: int
    prompt: Prompt
    params: SamplingParams
    max_tokens_given: bool  # False: params.max_new_tokens is cut to the context's rest
    arrived_s: float  # time.monotonic()


@dataclass(frozen=True, slots=True)
class Accepted:
    """The request was sent to the engine."""

    id: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Refused:
    """The request goes no further; the fields of `httpd.service.Rejected`."""

    id: int
    status: int
    message: str
    param: str | None = None
    code: str | None = None


Verdict = Accepted | Refused


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the engine thread tells of the model that it has loaded."""

    card: ModelCard
    kv_tokens: int  # capacity of the KV pool
    device: str
    dtype: str
