"""The folder where everything lives that set-up makes: one per user, shared by all clones.

python-3.13.5t/                 an interpreter built here, renamed into place when whole
venvs/TAG-HASH/                 the packages of one interpreter and lock; stamped when whole
models/SmolLM2-135M-Instruct/   renamed into place when whole
interpreters.json               which interpreter was chosen
build/ wheels/ tmp/ cargo/ uv/  what makes a second attempt quicker
logs/                           the output of every program that set-up ran
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from runtime.setup.console import SetupError, say

_STAMP = "plait-complete"


def mark_complete(folder: Path, part: str = "") -> None:
    """Says that `folder` (or one `part` of it) is done and verified; the last write of a step."""
    (folder / f"{_STAMP}{part}").touch()


def is_complete(folder: Path, part: str = "") -> bool:
    return (folder / f"{_STAMP}{part}").is_file()


@dataclass(frozen=True, slots=True)
class Cache:
    """The user's cache folder."""

    root: Path

    @staticmethod
    def of_user(environ: Mapping[str, str]) -> "Cache":
        """`$XDG_CACHE_HOME/plait`, or `~/.cache/plait`."""
        base = environ.get("XDG_CACHE_HOME", "")
        # The XDG specification has relative paths ignored.
        return Cache((Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "plait")

    def folder(self, *names: str) -> Path:
        """A folder inside, made if need be. Raises SetupError where it cannot be."""
        path = self.root.joinpath(*names)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SetupError(
                f"cannot write to the cache folder: {error}",
                "Make it writable, or choose another with XDG_CACHE_HOME=/some/folder.",
            ) from error
        return path

    def log(self, name: str) -> Path:
        return self.folder("logs") / f"{name}.log"

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """The environment of every program run here: what they keep stays in this folder."""
        own = {
            "TMPDIR": str(self.folder("tmp")),
            "UV_PYTHON_INSTALL_DIR": str(self.root / "uv"),
            "UV_PYTHON_BIN_DIR": str(self.root / "uv" / "bin"),
            "UV_PYTHON_INSTALL_BIN": "0",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "PIP_NO_INPUT": "1",
        }
        own["CARGO_HOME"] = environ.get("CARGO_HOME", str(self.root / "cargo"))
        # A GIL build of 3.13 or later refuses to start with it.
        inherited = {name: value for name, value in environ.items() if name != "PYTHON_GIL"}
        return inherited | own

    @contextlib.contextmanager
    def lock(self) -> Iterator[int]:
        """Holds the only right to change this folder; yields the locked file's descriptor.

        Children inherit the descriptor (`children.run`): the lock outlives a killed parent until
        the last program it started has ended, so that two never write to the same place.
        """
        path = self.folder() / "setup.lock"
        with path.open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say(f"another set-up is at work (it holds {path}); waiting for it")
                fcntl.flock(file, fcntl.LOCK_EX)
            yield file.fileno()
