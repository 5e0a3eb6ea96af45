"""The part of `plait capacity` behind --measure: its flags, whom it asks, and its table."""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import click
from click.core import ParameterSource
from rich.console import Console
from rich.table import Table
from rich.text import Text

from client.target import NoServer, Target, key_of_environment, model_of, root_of
from client.terminal import printable
from runtime.capacity.estimate import CELLS, Asked
from runtime.capacity.measure import Measured, Plan, Workload, in_ms, measure
from runtime.capacity.search import Status
from runtime.private_server import ServerFailed, private_server

Function = TypeVar("Function", bound=Callable[..., Any])

_STANDARD: Final = ",".join(f"{prompt}/{output}" for prompt, output in CELLS)
_MOST_TOKENS: Final = 1 << 20
_PLANNED: Final = {field.name: field.default for field in dataclasses.fields(Plan)}


class WorkloadsType(click.ParamType[tuple[Workload, ...]]):
    """`128/128,1024/128`: prompt and output tokens."""

    name = "PROMPT/OUTPUT,…"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[Workload, ...]:
        if isinstance(value, tuple):
            return value
        found = []
        for each in str(value).split(","):
            if not re.fullmatch(r"\s*[0-9]{1,7}/[0-9]{1,7}\s*", each):
                self.fail(f"{each!r} is no PROMPT/OUTPUT in tokens, as in 128/128", param, ctx)
            prompt, output = map(int, each.split("/"))
            if not (1 <= prompt <= _MOST_TOKENS and 1 <= output <= _MOST_TOKENS):
                self.fail(f"{each!r}: both must be from 1 to {_MOST_TOKENS}", param, ctx)
            found.append(Workload(prompt, output))
        return tuple(found)


def measure_options(command: Function) -> Function:
    """The flags of --measure, in the order of --help."""
    options = (
        click.option("--measure", is_flag=True, help="Load the model, or ask --url, and try how "
                     "many users at a time are answered in time: a search with more and more of "
                     "them.  [the next eight: of it]"),
        click.option("--url", help="Measure a server that runs, instead: Plait, or another that "
                     "takes token ids and ignore_eos.  [its key: environment variable "
                     "PLAIT_API_KEY or OPENAI_API_KEY]"),
        click.option("--workloads", type=WorkloadsType(), default=_STANDARD, show_default=True,
                     help="Prompt and output tokens of a request."),
        click.option("--ttft-s", type=click.FloatRange(0, min_open=True),
                     default=_PLANNED["ttft_s"], show_default=True,
                     help="Target: 99th percentile of the time to the first token."),
        click.option("--itl-ms", type=click.FloatRange(0, min_open=True),
                     default=_PLANNED["itl_ms"], show_default=True,
                     help="Target: median time between tokens."),
        click.option("--most-users", type=click.IntRange(1, 1 << 16),
                     default=_PLANNED["most_users"], show_default=True, help="No more are tried."),
        click.option("--rounds", type=click.IntRange(1, 1000), default=_PLANNED["rounds"],
                     show_default=True, help="Answers that each user of a trial gets."),
        click.option("--threads", type=click.IntRange(1, 256), default=_PLANNED["threads"],
                     help="Of the load.  [default: one for 32 users, and at most half of the "
                     "processors]"),
        click.option("--limit-s", type=click.FloatRange(0, min_open=True),
                     default=_PLANNED["limit_s"], show_default=True,
                     help="Time for all workloads together, once the model is loaded."),
    )  # fmt: skip
    return functools.reduce(lambda done, add: add(done), reversed(options), command)


def plan_of(
    flags: dict[str, Any], *, measure: bool, url: str | None, model: str | None, ranks: int
) -> Plan | None:
    """Takes the measuring flags out of `flags`; None: nothing is to be measured.

    Raises click.UsageError for what does not go together.
    """
    plan = Plan(**{name: flags.pop(name) for name in _PLANNED if name in flags})
    if not measure:
        _refuse_measuring_flags()
        return None
    if url is None and model is None:
        raise click.UsageError("--measure needs a --model to load, or the --url of a server")
    if url is None and ranks > 1:
        raise click.UsageError(
            f"--measure loads the model on one GPU: start `plait serve --tp {ranks}` and name it "
            "by --url"
        )
    return plan


def _refuse_measuring_flags() -> None:
    """Raises click.UsageError for one that is given without --measure."""
    context = click.get_current_context()
    for name in ("url", *_PLANNED):
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            flag = "--" + name.replace("_", "-")
            raise click.UsageError(f"{flag} is of --measure: without it, nothing is tried")


def run_measurement(
    plan: Plan, url: str | None, model: str | None, asked: Asked | None, *, is_shown: bool
) -> tuple[dict[str, Any], bool]:
    """What was found, for JSON, and whether every workload was answered.

    Raises click.ClickException where nobody answers at all.
    """
    try:
        with _server(url, model, asked) as target:
            found = measure(target, plan, Console(stderr=True))
    except (NoServer, ServerFailed) as error:
        raise click.ClickException(str(error)) from error
    if is_shown:
        Console().print(table_of(found, plan, target))
    told = {
        "server": {"url": None if url is None else target.url, "model": target.model},
        "targets": {"ttft_p99_ms": plan.ttft_s * 1e3, "itl_p50_ms": plan.itl_ms},
        "workloads": [dataclasses.asdict(each) for each in found],
    }
    return told, all(each.status is not Status.FAILED for each in found)


@contextmanager
def _server(url: str | None, model: str | None, asked: Asked | None) -> Iterator[Target]:
    """Who is measured. Raises NoServer or ServerFailed."""
    if url is not None:
        root, key = root_of(url), key_of_environment()
        yield Target(root, model or model_of(root, key), key=key)
        return
    assert asked is not None, "checked by plan_of"
    with private_server(asked.config) as target:
        yield target


def table_of(found: list[Measured], plan: Plan, target: Target) -> Table:
    """The figures for people."""
    table = Table(
        "prompt", "output", "users", "TTFT p99 ms", "median ITL ms", "tokens/s", "",
        title=Text(f"Most users of {printable(target.model)} with a TTFT p99 of {plan.ttft_s:g} s "
                   f"and a median ITL of {plan.itl_ms:g} ms"),
    )  # fmt: skip
    for each in found:
        *cells, said = _row(each)
        table.add_row(*cells, Text(said))
    for column in table.columns[:-1]:
        column.justify = "right"
    return table


def _row(found: Measured) -> tuple[str, ...]:
    sizes = f"{found.prompt_tokens:,}", f"{found.output_tokens:,}"
    said = printable(found.why or f"missed with {found.missed_at}")
    if found.status in (Status.TIME, Status.CLIENT) and found.missed_at is not None:
        said += f", missed with {found.missed_at}"
    trial = found.at_users
    if trial is None:
        return (*sizes, _users(found), "", "", "", said)
    return (
        *sizes, _users(found), in_ms(trial.ttft_p99_ms), in_ms(trial.itl_p50_ms),
        f"{trial.output_tokens_per_s:,.1f}", said,
    )  # fmt: skip


def _users(found: Measured) -> str:
    if found.status in (Status.CONTEXT, Status.FAILED):
        return "–"
    at_least = found.status in (Status.MOST, Status.TIME, Status.CLIENT) and found.users
    return f"≥ {found.users}" if at_least else str(found.users)
