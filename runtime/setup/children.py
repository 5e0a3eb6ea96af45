"""Runs the programs that do the work (apt-get, make, pip): output to a log, one line on screen."""

import os
import selectors
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from runtime.setup.cache import Cache
from runtime.setup.console import Status

_TAIL_LINES = 12


class Failed(Exception):
    """A program ended with an error; `tail` holds its last lines, `log` all of them."""

    def __init__(self, command: Sequence[str], code: int, tail: Sequence[str], log: Path) -> None:
        super().__init__(f"`{command[0]}` ended with code {code}")
        self.tail, self.log = tuple(tail), log

    def explain(self) -> str:
        return "\n".join([str(self), *(f"    {line}" for line in self.tail), f"    ({self.log})"])


@dataclass(frozen=True, slots=True)
class Workshop:
    """Where children run: the cache folder, the lock they help to hold, and their environment."""

    cache: Cache
    lock: int  # descriptor of the locked file
    environ: Mapping[str, str]

    def run(
        self,
        title: str,
        command: Sequence[str],
        *,
        log: str,
        cwd: Path | None = None,
        environ: Mapping[str, str] | None = None,
        describe: Callable[[str], str | None] = str.strip,
    ) -> None:
        """Runs `command` to its end. Its lines go to the log; `describe` turns one into a status.

        Raises Failed.
        """
        path = self.cache.log(log)
        with path.open("a") as file, Status(title) as status:
            file.write(f"$ {' '.join(command)}\n")
            file.flush()
            process = subprocess.Popen(
                command,
                cwd=cwd,
                env=dict(self.environ) | dict(environ or {}),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(self.lock,),
            )
            try:
                tail = _follow(process, file, status, describe)
            finally:
                # On Ctrl-C the terminal has interrupted the child as well: let it clean up first.
                if process.stdout is not None:
                    process.stdout.close()
                code = process.wait()
            if code:
                raise Failed(command, code, tail, path)


def _follow(
    process: "subprocess.Popen[bytes]",
    log: IO[str],
    status: Status,
    describe: Callable[[str], str | None],
) -> list[str]:
    assert process.stdout is not None
    tail: list[str] = []
    rest = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while True:
            if not selector.select(timeout=1.0):
                status.show()
                continue
            block = os.read(process.stdout.fileno(), 65536)
            *lines, rest = (rest + block).replace(b"\r", b"\n").split(b"\n")
            if not block:
                lines = [rest]
            for line in (raw.decode(errors="replace") for raw in lines):
                detail = describe(line)
                if detail:
                    status.show(detail)
                if line.strip():
                    log.write(line + "\n")
                    tail = [*tail, line.rstrip()][-_TAIL_LINES:]
            if not block:
                return tail
