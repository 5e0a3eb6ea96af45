"""The capacity report, as values: the JSON of GET /capacity and `plait capacity --json`.

All are frozen. None is what is not known; a field is never left out. How it is reckoned is in
estimate.py.
"""

from dataclasses import dataclass

from runtime.capacity.gpu import Gpus


@dataclass(frozen=True, slots=True)
class Host:
    """The machine without its GPUs."""

    cpus: int
    memory_total_bytes: int | None
    memory_available_bytes: int | None


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What the checkpoint's config says."""

    name: str
    architecture: str
    dtype: str
    parameters: int
    active_parameters: int  # that a token meets
    context_tokens: int  # the longest request
    weight_bytes: int
    kv_bytes_per_token: int


@dataclass(frozen=True, slots=True)
class Split:
    """The model over so many GPUs, or on the CPU: what each rank holds."""

    ranks: int
    weight_bytes: int
    kv_bytes_per_token: int
    context_bytes: int  # the driver's and the libraries' own
    workspace_bytes: int  # the largest prefill, and the rows' state
    graph_bytes: int
    kv_bytes: int  # of the pool
    kv_tokens: int  # that fit: 0 where the model does not
    available: bool  # there are so many GPUs; else it is what more of this kind would hold
    fits: bool
    why_not: str | None


@dataclass(frozen=True, slots=True)
class Concurrency:
    """How many requests of these lengths run at the same time, as memory and rows allow."""

    prompt_tokens: int
    output_tokens: int
    requests: int
    limited_by: str  # memory, max_running or context


@dataclass(frozen=True, slots=True)
class DecodeFloor:
    """A decode step of so many rows, each `context` tokens long: what no engine can beat."""

    batch: int
    context: int
    bytes: int  # a rank reads
    flops: int  # a rank computes
    bandwidth_s: float | None
    compute_s: float | None
    floor_s: float | None  # the larger of the two
    tokens_per_s: float | None  # the most, all rows together


@dataclass(frozen=True, slots=True)
class Capacity:
    """The whole report."""

    at_s: float  # unix time
    host: Host
    devices: Gpus
    model: ModelSize | None
    device: str | None  # what the model would run on: cuda, cuda:N or cpu
    ranks: int
    split: Split | None  # over `ranks`, as things are now
    splits: tuple[Split, ...]  # over every number of these GPUs that divides the model
    concurrency: tuple[Concurrency, ...]
    decode: tuple[DecodeFloor, ...]
    measured_kv_tokens: int | None  # what the engine then took; None where it does not run
    notes: tuple[str, ...]  # what a reader must know: other users, what is not known and why
