"""Capacity as users see it: how many at a time a server keeps its promise to, by trying.

A trial is a closed loop: so many users, each of whom asks again once answered, with prompts that
share nothing. They begin spread over the time that one answer takes alone. The promise is kept
where no request failed, and the TTFT's 99th percentile and the median ITL are within their targets.
It is not missed where the load's own threads were late: that says nothing of the server.

Knows how trials are made and judged; search.py which are worth making, table.py how they look.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from rich.console import Console

from client.bench.datasets.prompts import PromptMaker
from client.bench.datasets.synthetic import random_lengths
from client.bench.figures import summarise
from client.bench.load import Asking, Sample
from client.bench.runner import Pace, Ran, run_load
from client.bench.strain import Strain, threads_for
from client.bench.workload import Sampling
from client.target import NoServer, Target, ask_json
from runtime.capacity.search import Found, Status, search

# An answer that takes so many times what the targets add up to has missed them, whatever comes.
_PATIENCE: Final = 3.0
_WARM_TOKENS: Final = 32  # of the first answer, at most
_LAGS_OF_A_TTFT: Final = 4  # it begins, connects, sends and reads at a turn of the loop each
_FIRST_PART: Final = 4  # a search begins at this part of what a server has room for


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests of one size."""

    prompt_tokens: int
    output_tokens: int

    def __str__(self) -> str:
        return f"{self.prompt_tokens}/{self.output_tokens}"


@dataclass(frozen=True, slots=True)
class Plan:
    """What is promised, and how hard it is tried."""

    workloads: tuple[Workload, ...]
    ttft_s: float = 2.0  # 99th percentile
    itl_ms: float = 50.0  # median
    most_users: int = 512
    rounds: int = 4  # answers that each user of a trial gets
    limit_s: float = 1800.0  # for all workloads together
    threads: int | None = None  # of the load; None: as many as suit a trial's users
    vocab: int = 1000  # prompts are of ids below this: every model of any use has them


@dataclass(frozen=True, slots=True)
class Trial:
    """So many users, and what they saw. None: nothing came that could be timed."""

    users: int
    kept: bool
    ttft_p99_ms: float | None
    itl_p50_ms: float | None
    output_tokens_per_s: float
    requests: int
    failed: int
    took_s: float
    is_spoilt: bool = False  # missed, but the load itself was late
    client: Strain | None = None


@dataclass(frozen=True, slots=True)
class Measured:
    """The most users of one workload."""

    prompt_tokens: int
    output_tokens: int
    status: Status
    users: int  # 0: none
    missed_at: int | None  # the fewest users that were missed; None: nobody was
    why: str | None  # of a status that is not "found"
    trials: tuple[Trial, ...]

    @property
    def at_users(self) -> Trial | None:
        """A trial with so many users that was kept; with none, one of those that were missed."""
        wanted = self.users or 1
        return next((each for each in reversed(self.trials) if each.users == wanted
                     and each.kept == (self.users > 0)), None)  # fmt: skip


class NoAnswers(Exception):
    """A server answers no request of a workload; one line says what it does instead."""


def measure(target: Target, plan: Plan, console: Console) -> list[Measured]:
    """The most users of every workload of the plan. Raises NoServer where nobody answers.

    Each workload has a share of the time that is left, by how long one of its answers takes.
    """
    end_s = time.perf_counter() + plan.limit_s
    context_tokens, room = _context_of(target), _room_of(target)
    all_trials = [_Trials(target, plan, each, room, console) for each in plan.workloads]
    for trials in all_trials:
        trials.warm_up(context_tokens, end_s)
    found = []
    for index, trials in enumerate(all_trials):
        now_s = time.perf_counter()
        rest_s = sum(each.alone_s for each in all_trials[index:])
        share_s = (end_s - now_s) * trials.alone_s / rest_s if rest_s else 0.0
        found.append(trials.search(now_s + share_s))
    return found


def _lengths(workload: Workload) -> tuple[int, int]:
    return workload.prompt_tokens, workload.output_tokens


def _context_of(target: Target) -> int | None:
    """The longest request of the server's model; None where it does not tell, as OpenAI's do not.

    Raises NoServer.
    """
    told = ask_json(target.url, "/v1/models", target.key)
    models = told.get("data") if isinstance(told, dict) else None
    for model in models or ():
        if isinstance(model, dict) and model.get("id") == target.model:
            length = model.get("max_model_len")
            return length if isinstance(length, int) else None
    return None


@dataclass(frozen=True, slots=True)
class _Room:
    """What a server can hold at a time."""

    kv_tokens: int
    max_running: int

    def users(self, workload: Workload) -> int:
        return min(self.kv_tokens // sum(_lengths(workload)), self.max_running)


def _room_of(target: Target) -> _Room | None:
    """None where the server does not tell, as others than ours do not."""
    try:
        told = ask_json(target.url, "/live", target.key)
        return _Room(int(told["kv"]["total_tokens"]), int(told["load"]["max_running"]))
    except (NoServer, KeyError, TypeError, ValueError):
        return None


class _Trials:
    """The trials of one workload. Owned by the main thread."""

    def __init__(
        self, target: Target, plan: Plan, workload: Workload, room: _Room | None, console: Console
    ) -> None:
        self._target, self._plan, self._workload = target, plan, workload
        self._first = 1 if room is None else max(1, room.users(workload) // _FIRST_PART)
        self._console = console
        self._end_s = 0.0  # time.perf_counter() after which no answer is waited for
        self.alone_s = 0.0  # what one answer takes, with nobody else there
        self._none: Measured | None = None  # what is found without a search
        self._made: list[Trial] = []
        self._seed = 0

    def warm_up(self, context_tokens: int | None, end_s: float) -> None:
        """One answer, which tells how long others take; or why there is none."""
        self._end_s = end_s
        if context_tokens is not None and sum(_lengths(self._workload)) > context_tokens:
            why = f"the context has {context_tokens:,} tokens"
            self._none = self._measured(Found(Status.CONTEXT, 0, None), why)
            return
        output_tokens = min(self._workload.output_tokens, _WARM_TOKENS)
        (sample,) = self._load(1, 1, f"{self._workload}, warm-up", output_tokens).samples
        try:
            _check_answers([sample])
        except NoAnswers as error:
            self._none = self._measured(Found(Status.FAILED, 0, None), str(error))
            return
        self.alone_s = sample.ended_s - sample.sent_s
        if len(sample.arrivals_s) > 1:
            each_s = (sample.arrivals_s[-1] - sample.arrivals_s[0]) / (output_tokens - 1)
            self.alone_s += each_s * (self._workload.output_tokens - output_tokens)

    def search(self, end_s: float) -> Measured:
        """end_s  time.perf_counter() after which no answer is waited for"""
        if self._none is not None:
            return self._none
        self._end_s = end_s
        try:
            found = search(self._try, self._plan.most_users, self._is_time_up, first=self._first)
        except NoAnswers as error:
            return self._measured(Found(Status.FAILED, 0, None), str(error))
        return self._measured(found, self._why(found))

    def _measured(self, found: Found, why: str | None) -> Measured:
        return Measured(
            *_lengths(self._workload), found.status, found.users, found.missed_at, why,
            tuple(self._made),
        )  # fmt: skip

    def _why(self, found: Found) -> str | None:
        if found.status is Status.TIME:
            return "time was up"
        if found.status is Status.MOST:
            return "no more were tried"
        if found.status is Status.CLIENT:
            return "the load itself was late: more --threads, or another machine for it"
        return "missed with a single user" if found.status is Status.NONE else None

    def _is_time_up(self) -> bool:
        return time.perf_counter() >= self._end_s

    def _try(self, users: int) -> Trial:
        plan = self._plan
        ran = self._load(
            users, users * plan.rounds, f"{self._workload}, users: {users}",
            self._workload.output_tokens,
        )  # fmt: skip
        if users == 1:  # more than one may all be refused: that is a promise not kept
            _check_answers(ran.samples)
        trial = judged(users, summarise(ran.samples), plan, ran.strain)
        if trial.failed and self._is_time_up():
            return trial  # cut short: it says nothing
        self._made.append(trial)
        self._console.print(_line(self._workload, trial), highlight=False)
        return trial

    def _load(self, users: int, requests: int, title: str, output_tokens: int) -> Ran:
        plan, workload = self._plan, self._workload
        self._seed += 1  # new prompts: those of an earlier trial are in the prefix cache
        sessions = random_lengths(
            PromptMaker(as_ids=True, vocab=plan.vocab), self._seed, requests,
            (workload.prompt_tokens,) * 2, (output_tokens,) * 2,
        )  # fmt: skip
        patience_s = _PATIENCE * (plan.ttft_s + workload.output_tokens * plan.itl_ms / 1e3)
        asking = Asking(
            self._target, Sampling(chat=False), timeout_s=patience_s, until_s=self._end_s
        )
        pace = Pace(users, plan.threads or threads_for(users), ramp_up_s=self.alone_s)
        return run_load(asking, sessions, pace, self._console, title, transient=True)


def _check_answers(samples: Sequence[Sample]) -> None:
    """Raises NoAnswers where none came, and not for lack of time."""
    errors = [sample.error for sample in samples if sample.error is not None]
    if len(errors) == len(samples) and not any(e.startswith("TimeoutError") for e in errors):
        raise NoAnswers(errors[0])
    if not errors and not any(sample.arrivals_s for sample in samples):
        raise NoAnswers("the answers have no text, so nothing can be timed")


def judged(users: int, figures: dict[str, Any], plan: Plan, strain: Strain | None = None) -> Trial:
    """What a trial's figures say of the promise."""
    kept = not figures["failed"] and _are_kept(figures, plan, 0.0)
    return Trial(
        users, kept, figures["ttft_ms"].get("p99"), figures["itl_ms"].get("p50"),
        figures["output_tokens_per_s"], figures["requests"], figures["failed"], figures["wall_s"],
        is_spoilt=not kept and strain is not None and _is_spoilt(figures, plan, strain),
        client=strain,
    )  # fmt: skip


def _are_kept(figures: dict[str, Any], plan: Plan, lag_ms: float) -> bool:
    """Whether the targets are, for a server of whose times the client's lag is no part."""
    ttft_ms, itl_ms = figures["ttft_ms"].get("p99"), figures["itl_ms"].get("p50")
    return (
        ttft_ms is not None
        and ttft_ms - _LAGS_OF_A_TTFT * lag_ms <= plan.ttft_s * 1e3
        and (itl_ms is None or itl_ms - lag_ms <= plan.itl_ms)  # an answer of one token has none
    )


def _is_spoilt(figures: dict[str, Any], plan: Plan, strain: Strain) -> bool:
    """Whether a miss may be the load's own.

    A busy thread lets work pile up without a bound; a late one adds its lag. On a machine whose
    processors are all the model's, loops are late, too, and that is a miss like any other.
    """
    return strain.is_busy or (strain.is_late and _are_kept(figures, plan, strain.lag_p99_ms))


def _line(workload: Workload, trial: Trial) -> str:
    failed = f", {trial.failed} of {trial.requests} failed" if trial.failed else ""
    judgement = "kept" if trial.kept else "missed"
    if trial.is_spoilt:
        judgement = f"says nothing, since the load itself was late ({trial.client})"
    return (
        f"{workload}, users: {trial.users}: TTFT p99 {in_ms(trial.ttft_p99_ms)} ms, median ITL "
        f"{in_ms(trial.itl_p50_ms)} ms{failed}: {judgement}"
    )


def in_ms(value: float | None) -> str:
    """As people read it."""
    return "?" if value is None else f"{value:,.1f}"
