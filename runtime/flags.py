"""Command-line options that are named, and have their defaults, like fields of the settings."""

import dataclasses
from collections.abc import Callable
from typing import Any, Final, TypeVar

import click

from engine.config import EngineConfig
from runtime.config import ServerConfig

Function = TypeVar("Function", bound=Callable[..., Any])

_DEFAULTS: Final = {
    field.name: field.default
    for config in (EngineConfig, ServerConfig)
    for field in dataclasses.fields(config)
}


def option(flag: str, help: str, **more: Any) -> Callable[[Function], Function]:
    """A flag named like its field, with the field's default."""
    field = flag.split("/")[0].removeprefix("--").replace("-", "_")
    default = _DEFAULTS[field]
    return click.option(flag, field, default=default, show_default=default is not None, help=help,
                        **more)  # fmt: skip
