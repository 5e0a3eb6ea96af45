"""Stand-ins for a machine to set up: programs on PATH, and the workshop that runs them."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from runtime.setup.cache import Cache
from runtime.setup.children import Failed


def program(path: Path, script: str) -> Path:
    """An executable shell script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def python(
    path: Path, version: tuple[int, int], *, free_threaded: bool, missing: Sequence[str] = ()
) -> Path:
    """A program that answers set-up's question as a Python of that kind would."""
    answer = {
        "executable": str(path),
        "version": version,
        "free_threaded": free_threaded,
        "missing": missing,
    }
    return program(path, f"echo '{json.dumps(answer)}'")


@dataclass
class FakeWorkshop:
    """Runs nothing: remembers commands, and lets `act` play their part, or fail."""

    cache: Cache
    commands: list[list[str]] = field(default_factory=list)
    titles: list[str] = field(default_factory=list)
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    lock: int = -1

    def act(self, command: Sequence[str]) -> bool:
        """What the command would do; whether it succeeds."""
        return True

    def run(self, title: str, command: Sequence[str], *, log: str, **_: object) -> None:
        self.titles.append(title)
        self.commands.append(list(command))
        if not self.act(command):
            raise Failed(command, 1, ["it did not work"], self.cache.log(log))
