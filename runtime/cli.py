"""The `plait` command: serve a model, chat with it, measure it; in a checkout run its tests.

`./plait` in a checkout prepares an environment and runs this inside; an installed Plait runs it as
it is. It knows the commands' names; what each takes and does is its own module's business.
"""

import importlib.util
import os
import sys
from pathlib import Path
from typing import NoReturn

import click

from client.bench.command import bench
from runtime.capacity.command import capacity
from runtime.chat import chat
from runtime.gil import restart_without_gil
from runtime.serve import serve
from runtime.setup.console import SetupError, say
from runtime.setup.model import prepare_default
from runtime.version import plait_version

_ROOT = Path(__file__).resolve().parent.parent
_IN_CHECKOUT = (_ROOT / "tests").is_dir() and (_ROOT / "pyproject.toml").is_file()
_ANYTHING = {"ignore_unknown_options": True, "help_option_names": []}


@click.group()
@click.version_option(plait_version(), message="plait %(version)s")
def commands() -> None:
    """Serves language models over an OpenAI-compatible API, chats with them, measures them."""


commands.add_command(serve)
commands.add_command(capacity)
commands.add_command(chat)
commands.add_command(bench)


@commands.command(context_settings=_ANYTHING, hidden=not _IN_CHECKOUT)
@click.argument("pytest_arguments", nargs=-1, type=click.UNPROCESSED)
def test(pytest_arguments: tuple[str, ...]) -> None:
    """Runs the test suite of a checkout; arguments go to pytest."""
    if not _IN_CHECKOUT:
        raise click.ClickException("`plait test` works in a checkout only: run ./plait test there")
    if importlib.util.find_spec("pytest") is None:
        raise click.ClickException("pytest is not installed here: run ./plait test in the checkout")
    restart_without_gil()
    prepare_default()
    os.chdir(_ROOT)
    _become([sys.executable, "-m", "pytest", *pytest_arguments])


@commands.command(context_settings=_ANYTHING, hidden=True)
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def run(command: tuple[str, ...]) -> None:
    """Runs COMMAND in the environment that ./plait prepared, with the default model in place."""
    prepare_default()
    _become(list(command))


def _become(command: list[str]) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvp(command[0], command)
    except OSError as error:
        raise click.ClickException(f"cannot run {command[0]}: {error.strerror}") from error


def main() -> None:
    """Entry point of the `plait` command."""
    try:
        commands(prog_name="plait")
    except SetupError as error:
        say(f"error: {error}")
        sys.exit(1)


if __name__ == "__main__":
    main()
