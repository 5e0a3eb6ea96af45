"""What the server does now, as values: the JSON of GET /live, field by field.

All are frozen. Times are seconds, rates and quantiles are of the last `WINDOW_S`. None is what is
not known (no GPU, no model yet, nothing in the window); a field is never left out.
"""

from dataclasses import dataclass
from typing import Final

from runtime.capacity.gpu import Gpu

WINDOW_S: Final = 10.0
MOST_REQUESTS: Final = 256  # of `Live.requests`


@dataclass(frozen=True, slots=True)
class Quantiles:
    """How values of the window are spread; None where there were none."""

    count: int
    p50: float | None
    p90: float | None
    p99: float | None
    max: float | None


@dataclass(frozen=True, slots=True)
class Throughput:
    """A second, over the window."""

    requests: float  # that ended
    prompt_tokens: float  # of requests that got their first token, cached ones included
    cached_tokens: float  # of those: taken from the prefix cache
    output_tokens: float


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds, over the window, as they leave for the clients."""

    ttft: Quantiles  # from a request's arrival to its first token
    itl: Quantiles  # between two tokens of a request
    queue: Quantiles  # from arrival to the start of prefill
    e2e: Quantiles  # from arrival to the last token


@dataclass(frozen=True, slots=True)
class Load:
    """How many requests there are, and where."""

    alive: int  # accepted and not over
    encoding: int  # at a tokenizer thread
    waiting: int  # for a row
    running: int  # hold a row and pages
    max_running: int
    max_alive: int  # beyond it clients get a 503
    waiting_tokens: int  # of prompts whose first token has not come
    start_estimate_s: float | None  # until a request that came now would start; 0: at once


@dataclass(frozen=True, slots=True)
class Tier:
    """One level of the cache of keys and values, in tokens."""

    total_tokens: int
    used_tokens: int  # held by running requests
    cached_tokens: int  # kept for prompts that may come again, and given up when there is need
    free_tokens: int


@dataclass(frozen=True, slots=True)
class Steps:
    """What the engine's steps take."""

    steps: int  # since the start
    step_s: Quantiles
    host_s: float | None  # a step, mean of the window: planning and committing
    retractions: int  # since the start
    idle_share: float | None  # of the window without a step under way


@dataclass(frozen=True, slots=True)
class Warned:
    """Something that will cost speed or requests, while it lasts."""

    code: str  # stable, for programs
    message: str
    since_s: float  # unix time


@dataclass(frozen=True, slots=True)
class RunningRequest:
    """One request that is not over."""

    id: str | None  # of its response, what POST /abort takes; None until there is one
    request_id: str | None  # its x-request-id
    phase: str  # encoding, waiting, prefill or decode
    age_s: float
    prompt_tokens: int | None  # None while it is encoded
    cached_tokens: int
    output_tokens: int
    max_output_tokens: int


@dataclass(frozen=True, slots=True)
class Live:
    """The whole answer of GET /live."""

    at_s: float  # unix time
    uptime_s: float
    state: str
    version: str
    gil_enabled: bool
    model: str | None
    window_s: float
    throughput: Throughput
    latency: Latency
    load: Load
    kv: Tier | None  # on the device
    host_kv: Tier | None  # in the host's memory; None where there is no such tier
    steps: Steps | None
    gpus: tuple[Gpu, ...]
    memory_available_bytes: int | None  # of the host
    warnings: tuple[Warned, ...]
    requests: tuple[RunningRequest, ...]  # the oldest first, at most MOST_REQUESTS
