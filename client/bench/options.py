"""What `plait bench` is told, checked: ranges of numbers, datasets, and what goes with what."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import click

from client.bench.arrivals import faster, poisson
from client.bench.datasets.files import agents, sharegpt, trace
from client.bench.datasets.prompts import PromptMaker
from client.bench.datasets.records import BadFile
from client.bench.datasets.synthetic import random_lengths, shared_prefix
from client.bench.workload import CountTokens, Session

DATASETS: Final = ("random", "shared-prefix", "sharegpt", "agents", "trace")
_WITH_FILE: Final = DATASETS[2:]
Number = TypeVar("Number", int, float)


class RangeType(click.ParamType[tuple[Number, Number]], Generic[Number]):
    """`128`, or `100-1024` with both ends included."""

    def __init__(self, number: type[Number], low: Number, *, may_fall: bool = False) -> None:
        """low  the least that either end may be;  may_fall  whether the second may be smaller"""
        self.name = "N|LOW-HIGH" if not may_fall else "N|FIRST-LAST"
        self._number: type[Number] = number
        self._low: Number = low
        self._may_fall = may_fall

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[Number, Number]:
        if isinstance(value, tuple):
            return value
        first, dash, last = str(value).partition("-")
        try:
            found = self._number(first), self._number(last if dash else first)
        except ValueError:
            self.fail(f"{value!r} is neither a number nor two with a dash", param, ctx)
        if min(found) < self._low or not all(each < float("inf") for each in found):
            self.fail(f"{value!r}: it must be at least {self._low}", param, ctx)
        if found[0] > found[1] and not self._may_fall:
            self.fail(f"{value!r}: the first must be at most the second", param, ctx)
        return found


TOKENS: Final = RangeType(int, 1)
RATE: Final = RangeType(float, 0.001, may_fall=True)


@dataclass(frozen=True, slots=True)
class Workload:
    """Which sessions a run sends."""

    dataset: str
    file: Path | None
    requests: int
    input_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    prefix_tokens: int
    groups: int
    vocab: int
    as_ids: bool
    rate: tuple[float, float] | None
    speed: float
    seed: int

    def check(self) -> None:
        """Raises click.UsageError for options that do not go together."""
        if (self.file is None) == (self.dataset in _WITH_FILE):
            needs = "needs a --file" if self.file is None else "takes no --file"
            raise click.UsageError(f"--dataset {self.dataset} {needs}")
        if self.dataset == "trace" and self.rate is not None:
            raise click.UsageError("a trace brings its own times: --speed changes them, not --rate")

    @property
    def is_timed(self) -> bool:
        """Whether it is an open loop."""
        return self.rate is not None or self.dataset == "trace"

    def warm_up(self, requests: int) -> "Workload":
        """Sessions of the kind, all at once; a trace's own ones would be cached when they count."""
        dataset, file = ("random", None) if self.dataset == "trace" else (self.dataset, self.file)
        return replace(
            self, dataset=dataset, file=file, requests=requests, seed=self.seed + 1, rate=None
        )

    def sessions(self, count: CountTokens) -> list[Session]:
        """All of them, each with its time where it is an open loop. Raises click.UsageError."""
        try:
            made = self._made(count)
            if self.rate is not None:
                return poisson(made, self.rate, self.seed)
            return faster(made, self.speed) if self.dataset == "trace" else made
        except BadFile as error:
            raise click.UsageError(str(error)) from error

    def _made(self, count: CountTokens) -> list[Session]:
        maker = PromptMaker(self.as_ids, self.vocab)
        lengths = self.input_tokens, self.output_tokens
        if self.dataset == "random":
            return random_lengths(maker, self.seed, self.requests, *lengths)
        if self.dataset == "shared-prefix":
            return shared_prefix(
                maker, self.seed, self.requests, *lengths,
                prefix_tokens=self.prefix_tokens, groups=self.groups,
            )  # fmt: skip
        assert self.file is not None, "checked"
        if self.dataset == "sharegpt":
            return sharegpt(self.file, self.seed, self.requests, count)
        if self.dataset == "agents":
            return agents(self.file, self.requests, self.output_tokens[1])
        return trace(self.file, self.requests, maker)
