"""`plait chat`: a chat in the terminal, with a server that runs or with one of its own.

Puts together; how a chat goes is client.chat's business.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from rich.console import Console

from client.chat.conversation import Conversation
from client.chat.session import ChatSession, line_reader
from client.target import NoServer, Target, key_of_environment, model_of, root_of
from engine.config import EngineConfig
from engine.errors import ModelError
from engine.limits import check_settings
from engine.model_config import read_model_config
from runtime.checkpoint import find_checkpoint
from runtime.gil import restart_without_gil
from runtime.private_server import ServerFailed, private_server

_URL = "http://127.0.0.1:8000"


@click.command()
@click.option("--url", help=f"A server that runs.  [default: {_URL}; its key: environment variable "
              "PLAIT_API_KEY or OPENAI_API_KEY]")  # fmt: skip
@click.option("--model", help="Without --url: load this checkpoint's folder or name here, and chat "
              "with it. With --url: which of the server's models.")  # fmt: skip
@click.option("--device", default="auto", show_default=True, help="Of a model that is loaded here.")
@click.option("--system", default="", help="The system prompt.")
@click.option("--temperature", type=float, help="The next two, too: without it, the server's.")
@click.option("--top-p", type=float)
@click.option("--max-tokens", type=int)
@click.option("--set", "fields", multiple=True, metavar="NAME=VALUE",
              help="Any other field of the request, as JSON or text; repeat.")  # fmt: skip
@click.option("--markdown/--no-markdown", default=None,
              help="Show answers as Markdown.  [default: in a terminal]")  # fmt: skip
@click.option("--history/--no-history", default=True, show_default=True,
              help="Keep what is typed, for the arrow keys of the next time.")  # fmt: skip
def chat(
    url: str | None, model: str | None, device: str, system: str, temperature: float | None,
    top_p: float | None, max_tokens: int | None, fields: tuple[str, ...], markdown: bool | None,
    history: bool,
) -> None:  # fmt: skip
    """Chats with a model in the terminal; /help tells more there."""
    settings = {"temperature": temperature, "top_p": top_p, "max_tokens": max_tokens}
    console = Console(highlight=False)
    with _server(url, model, device) as target:
        conversation = Conversation(
            target.model, system, {k: v for k, v in settings.items() if v is not None}
        )
        _set_all(conversation, fields)
        if console.is_terminal:
            console.print(f"[bold]{target.model}[/bold] [dim]– /help for help, Ctrl-D to end[/dim]")
        read = line_reader(_history_file() if history and sys.stdin.isatty() else None)
        if not sys.stdin.isatty():
            read = lambda _prompt: input()  # noqa: E731  (a prompt is for people)
        shown = console.is_terminal if markdown is None else markdown
        all_answered = ChatSession(target, conversation, console, read, markdown=shown).run()
    if not all_answered and not sys.stdin.isatty():
        sys.exit(1)  # for scripts; people have seen it


def _set_all(conversation: Conversation, fields: tuple[str, ...]) -> None:
    """Raises click.UsageError."""
    for each in fields:
        name, equals, value = each.partition("=")
        if not equals:
            raise click.UsageError(f"--set {each}: it must be NAME=VALUE")
        try:
            conversation.set(name, value)
        except ValueError as error:
            raise click.UsageError(f"--set {each}: {error}") from error


@contextmanager
def _server(url: str | None, model: str | None, device: str) -> Iterator[Target]:
    """Who answers. Raises click.ClickException where nobody does."""
    if url is None and model is not None:
        restart_without_gil()
        try:
            with private_server(_engine_of(model, device)) as target:
                yield target
        except ServerFailed as error:
            raise click.ClickException(str(error)) from error
        return
    root, key = root_of(url or _URL), key_of_environment()
    try:
        target = Target(root, model or model_of(root, key), key=key)
    except NoServer as error:
        hint = "" if url else "; `plait serve` starts a server, `plait chat --model` needs none"
        raise click.ClickException(f"{error}{hint}") from error
    yield target


def _engine_of(model: str, device: str) -> EngineConfig:
    """Raises click.ClickException for what cannot be loaded."""
    try:
        engine = EngineConfig(find_checkpoint(model), device=device)
        check_settings(engine, read_model_config(engine.model))
        return engine
    except (ValueError, ModelError) as error:
        raise click.ClickException(str(error)) from error


def _history_file() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "plait" / "chat_history"
