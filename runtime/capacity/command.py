"""`plait capacity`: what this machine can carry, alone or with a model.

Loads nothing, but with --measure, which tries it.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from engine.config import EngineConfig
from engine.errors import ModelError
from engine.limits import check_settings
from engine.model_config import read_model_config
from runtime.capacity.estimate import Asked, report_on
from runtime.capacity.host import multiplies_bfloat16, read_host
from runtime.capacity.measure_command import measure_options, plan_of, run_measurement
from runtime.capacity.nvml import Nvml
from runtime.capacity.report import Capacity
from runtime.capacity.table import show
from runtime.checkpoint import find_checkpoint, find_config
from runtime.flags import option
from runtime.gil import restart_without_gil


@click.command()
@click.option(
    "--model",
    help="A checkpoint's folder, or its name on the Hugging Face hub, of which only config.json is "
    "fetched.  [default: the machine alone]",
)
@click.option("--tp", "ranks", default=1, show_default=True, help="GPUs that share the model.")
@click.option("--json", "as_json", is_flag=True, help="For programs: as GET /capacity.")
@measure_options
@option("--device", "auto, cpu, cuda or cuda:N.")
@option("--dtype", "auto, float32, float16 or bfloat16.")
@option("--page-size", "The rest: as for plait serve.", type=int)
@option("--max-running", "", type=int)
@option("--max-model-len", "", type=int)
@option("--prefill-budget", "", type=int)
@option("--max-kv-tokens", "", type=int)
@option("--memory-fraction", "", type=float)
def capacity(
    model: str | None, ranks: int, as_json: bool, measure: bool, url: str | None, **flags: Any
) -> None:
    """Reports what this machine's GPUs can carry; without --measure it loads nothing."""
    if measure:
        restart_without_gil()
    plan = plan_of(flags, measure=measure, url=url, model=model, ranks=ranks)
    try:
        folder = None if model is None or url is not None else _folder(model, measure)
        asked = None if folder is None else asked_of(folder, ranks, flags)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    told: dict[str, Any] = {}
    report = None if url is not None else _report(asked)
    if report is not None:
        told = dataclasses.asdict(report)
        if not as_json:
            show(report, Console())
    fits = asked is None or (report is not None and report.split is not None and report.split.fits)
    all_answered = True
    if plan is not None and fits:
        told["measured"], all_answered = run_measurement(
            plan, url, model, asked, is_shown=not as_json
        )
    if as_json:
        click.echo(json.dumps(told, indent=2))
    if not (fits and all_answered):
        raise SystemExit(1)  # for scripts: it does not fit, or does not answer


def _folder(model: str, whole: bool) -> Path:
    """Raises ValueError where there is no such model."""
    return find_checkpoint(model) if whole else find_config(model)


def _report(asked: Asked | None) -> Capacity:
    nvml = Nvml()
    report = report_on(nvml.read(), read_host(), asked)
    nvml.close()
    return report


def asked_of(folder: Path, ranks: int, flags: dict[str, Any]) -> Asked:
    """What the flags ask about. Raises ValueError naming field, value and limit."""
    flags = {**flags, "prefill_budget": flags.get("prefill_budget") or None}
    config = EngineConfig(model=folder, **flags)
    if ranks < 1:
        raise ValueError(f"tp is {ranks}; it must be at least 1")
    try:
        shape = read_model_config(folder)
        check_settings(config, shape)
    except ModelError as error:
        raise ValueError(str(error)) from error
    return Asked(config, shape, folder.resolve().name, ranks, multiplies_bfloat16())
