"""Finds or makes the Python that Plait runs on: free-threaded if there is any way to have one.

The order: the one that the user names; python3.14t or python3.13t on PATH; one that an earlier
set-up built; 3.14t through uv; 3.13t from Debian's source package; an ordinary build, with a
warning. It knows nothing of packages: whether those install is `packages`' business, and may send
the caller back for an ordinary one.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from runtime.setup import debian
from runtime.setup.cache import is_complete, mark_complete
from runtime.setup.children import Failed, Workshop
from runtime.setup.console import SetupError, say

OLDEST, NEWEST = (3, 11), (3, 14)
_FREE_THREADED = ("python3.14t", "python3.13t")
_ORDINARY = ("python3", "python3.14", "python3.13", "python3.12", "python3.11")
# What the packages and the server import that a build without the right headers lacks. Without
# sqlite3 everything but coverage tools works, so it is not asked for.
_NEEDED = ("ssl", "zlib", "ctypes", "lzma", "bz2", "venv", "ensurepip")
_PROBE = f"""
import importlib.util, json, sys, sysconfig
def lacks(name):
    try: __import__(name)
    except ImportError: return True
print(json.dumps(dict(
    executable=sys.executable,
    version=list(sys.version_info[:2]),
    free_threaded=bool(sysconfig.get_config_var("Py_GIL_DISABLED")),
    missing=[name for name in {_NEEDED!r} if lacks(name)],
)))
"""


class NotAvailable(Exception):
    """Every reason why there is no free-threaded interpreter on this machine."""


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A Python that answered when it was asked what it is."""

    executable: str
    version: tuple[int, int]
    free_threaded: bool
    missing: tuple[str, ...]  # modules that it needs and lacks

    @property
    def tag(self) -> str:
        return "cp{}{}".format(*self.version) + "t" * self.free_threaded

    def fault(self) -> str | None:
        """Why it cannot be used, or None."""
        oldest = (3, 13) if self.free_threaded else OLDEST
        if not oldest <= self.version <= NEWEST:
            bounds = "{}.{} to {}.{}".format(*oldest, *NEWEST)
            return f"{self.executable} is {self.tag}; the packages need {bounds}"
        if self.missing:
            names = ", ".join(self.missing)
            hint = " (Debian: apt install python3-venv)" if "ensurepip" in self.missing else ""
            return f"{self.executable} lacks the modules {names}{hint}"
        return None


def probe(executable: str) -> Interpreter | None:
    """Asks a program whether it is a Python, and which; None where it is not."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHON_GIL"}
    try:
        answer = subprocess.run(
            [executable, "-I", "-c", _PROBE],
            env=environ,
            capture_output=True,
            timeout=60,
            check=True,
        )
        fields = json.loads(answer.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return Interpreter(
        executable=fields["executable"],
        version=tuple(fields["version"]),
        free_threaded=fields["free_threaded"],
        missing=tuple(fields["missing"]),
    )


def named(executable: str) -> Interpreter:
    """The interpreter that the user asks for. Raises SetupError where it cannot be used."""
    path = shutil.which(executable)
    found = probe(path) if path else None
    problem = f"{executable} is not a Python that runs" if found is None else found.fault()
    if problem:
        raise SetupError(problem, "Name another with --python or PLAIT_PYTHON, or name none.")
    assert found is not None
    return found


def free_threaded(shop: Workshop) -> Interpreter:
    """The best free-threaded interpreter to be had. Raises NotAvailable."""
    reasons: list[str] = []
    for attempt in (_on_path, _kept, _through_uv, _built):
        found = attempt(shop, reasons)
        if found is not None:
            return found
    raise NotAvailable("; ".join(reasons))


def ordinary() -> Interpreter:
    """An ordinary Python, this one first. Raises SetupError where none can be used."""
    faults: list[str] = []
    for path in _paths((sys.executable, *_ORDINARY)):
        found = probe(path)
        fault = f"{path} does not run" if found is None else found.fault()
        if found is not None and fault is None:
            return found
        faults.append(str(fault))
    raise SetupError(
        "no Python can be used: " + "; ".join(faults), "Install python3 and python3-venv."
    )


def _paths(names: tuple[str, ...]) -> Iterator[str]:
    found = (shutil.which(name) for name in names if name)
    return iter(dict.fromkeys(path for path in found if path))


def _checked(path: str, reasons: list[str]) -> Interpreter | None:
    found = probe(path)
    fault = None if found is None else found.fault()
    if fault:
        reasons.append(fault)
    return found if found is not None and fault is None and found.free_threaded else None


def _on_path(shop: Workshop, reasons: list[str]) -> Interpreter | None:
    for path in _paths(_FREE_THREADED):
        found = _checked(path, reasons)
        if found is not None:
            say(f"found {found.executable} ({found.tag})")
            return found
    reasons.append(f"no {' or '.join(_FREE_THREADED)} on PATH")
    return None


def _kept(shop: Workshop, reasons: list[str]) -> Interpreter | None:
    """An interpreter that an earlier set-up built, complete or only lacking its stamp."""
    for folder in sorted(shop.cache.root.glob("python-3.*t"), reverse=True):
        executable = debian.executable(folder)
        found = _checked(str(executable), []) if executable.exists() else None
        if found is not None:
            if not is_complete(folder):
                mark_complete(folder)
            return found
    return None


def _through_uv(shop: Workshop, reasons: list[str]) -> Interpreter | None:
    uv = shutil.which("uv")
    if uv is None:
        reasons.append("no uv on PATH")
        return None
    try:
        shop.run(
            "Fetching Python 3.14t through uv (30 MB)", [uv, "python", "install", "3.14t"], log="uv"
        )
    except Failed as failure:
        reasons.append(f"uv could not fetch 3.14t (see {failure.log})")
        return None
    installed = sorted(shop.cache.root.glob("uv/*/bin/python3.14t"))
    return _checked(str(installed[-1]), reasons) if installed else None


def _built(shop: Workshop, reasons: list[str]) -> Interpreter | None:
    try:
        folder = debian.build(shop)
    except debian.CannotBuild as reason:
        reasons.append(str(reason))
        return None
    found = _checked(str(debian.executable(folder)), reasons)
    if found is not None:
        mark_complete(folder)
    return found
