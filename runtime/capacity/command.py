"""`plait capacity`: what this machine can carry, alone or with a model. Loads nothing."""

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
from runtime.capacity.nvml import Nvml
from runtime.capacity.table import show
from runtime.checkpoint import find_config
from runtime.flags import option


@click.command()
@click.option(
    "--model",
    help="A checkpoint's folder, or its name on the Hugging Face hub, of which only config.json is "
    "fetched.  [default: the machine alone]",
)
@click.option("--tp", "ranks", default=1, show_default=True, help="GPUs that share the model.")
@click.option("--json", "as_json", is_flag=True, help="For programs: as GET /capacity.")
@option("--device", "auto, cpu, cuda or cuda:N.")
@option("--dtype", "auto, float32, float16 or bfloat16.")
@option("--page-size", "The rest: as for plait serve.", type=int)
@option("--max-running", "", type=int)
@option("--max-model-len", "", type=int)
@option("--prefill-budget", "", type=int)
@option("--max-kv-tokens", "", type=int)
@option("--memory-fraction", "", type=float)
def capacity(model: str | None, ranks: int, as_json: bool, **flags: Any) -> None:
    """Reports what this machine's GPUs can carry; loads nothing, and takes no memory."""
    try:
        asked = None if model is None else asked_of(find_config(model), ranks, flags)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    nvml = Nvml()
    report = report_on(nvml.read(), read_host(), asked)
    nvml.close()
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(report), indent=2))
    else:
        show(report, Console())
    if asked is not None and (report.split is None or not report.split.fits):
        raise SystemExit(1)  # for scripts: it does not fit


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
