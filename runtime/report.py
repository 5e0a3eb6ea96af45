"""What a person at the terminal sees while the server starts; programs get it as log lines."""

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from runtime.capacity.report import Capacity
from runtime.capacity.table import summary
from runtime.config import ServerConfig
from runtime.gil import is_gil_enabled
from runtime.messages import ModelFacts

log = logging.getLogger(__name__)

_EVERY_S: Final = 5.0  # between two lines about the same, where nobody watches a bar


class LoadingReport:
    """Progress of loading: a bar on a terminal, a line now and then elsewhere.

    Owned by the engine thread while it loads, then by the main thread.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, *, as_log: bool = False
    ) -> None:
        """as_log  write log lines, and never a bar"""
        self._console = Console(stderr=True)
        self._as_log = as_log
        self._clock = clock
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._doing = ""
        self._told_s = 0.0

    def __call__(self, doing: str, done: float | None) -> None:
        """
        doing  what is being loaded or made
        done   how much of it, 0 to 1; None where that is not known
        """
        if self._console.is_terminal and not self._as_log:
            self._draw(doing, done)
        elif doing != self._doing or self._clock() - self._told_s >= _EVERY_S:
            percent = "" if done is None else f" {100 * done:.0f} %"
            tell([f"{doing}{percent}"], as_log=self._as_log)
            self._told_s = self._clock()
        self._doing = doing

    def finish(self) -> None:
        """Takes the bar away."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _draw(self, doing: str, done: float | None) -> None:
        if self._bar is None or self._task is None:
            # Without its own refreshing thread: every thread here is one that is watched.
            columns = (TextColumn("plait: {task.description}"), BarColumn(), TimeElapsedColumn())
            self._bar = Progress(
                *columns, console=self._console, transient=True, auto_refresh=False
            )
            self._bar.start()
            self._task = self._bar.add_task(doing, total=1.0)
        if doing != self._doing or self._clock() - self._told_s >= 0.1:
            self._told_s = self._clock()
            self._bar.update(self._task, description=doing, completed=done or 0.0)
            self._bar.refresh()


def tell(lines: Sequence[str], *, as_log: bool) -> None:
    """Says something to whoever started the server."""
    if as_log:
        for line in lines:
            log.info("%s", line.strip())
    else:
        said = [line if line.startswith(" ") else f"plait: {line}" for line in lines]
        print("\n".join(said), file=sys.stderr, flush=True)


def show_capacity(report: Capacity, *, as_log: bool) -> None:
    """Says what the machine can carry, while the model is loaded."""
    tell(summary(report), as_log=as_log)


def show_ready(config: ServerConfig, facts: ModelFacts, address: str) -> None:
    """Says that the API answers, where, and how to try it."""
    gil = "one core for all threads (GIL on)" if is_gil_enabled() else "free-threaded (GIL off)"
    name = facts.card.id
    lines = [
        f"{name} is ready at {address} after {_process_age_s():.1f} s",
        f"  {facts.dtype} on {facts.device}; KV cache for {facts.kv_tokens:,} tokens; "
        f"context {facts.card.max_model_len:,}; {gil}",
        "  Try it:",
        f"  {_curl(config, name, address, chat=facts.card.has_chat_template)}",
    ]
    if not config.api_keys and not config.is_local:
        lines.append("  Without API keys, whoever reaches this address may use it: --api-key-file")
    tell(lines, as_log=config.log_format == "json")


def _process_age_s() -> float:
    """Seconds since this process began, the interpreter's own start and imports included."""
    # Field 22 of proc(5)'s stat, counted behind the name, which may hold spaces.
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def _curl(config: ServerConfig, name: str, address: str, *, chat: bool) -> str:
    question = "What is the capital of France?"
    path = "chat/completions" if chat else "completions"
    messages = [{"role": "user", "content": question}]
    asked: dict[str, object] = {"messages": messages} if chat else {"prompt": question}
    # A small model without a limit may talk until the context is full.
    body = {"model": name, **asked, "temperature": 0, "max_tokens": 100}
    options = "-k " if config.tls_cert is not None else ""
    if config.api_keys:
        options += "-H 'authorization: Bearer KEY' "
    said = json.dumps(body).replace("'", "'\\''")
    return f"curl {options}{address}/v1/{path} -H 'content-type: application/json' -d '{said}'"
