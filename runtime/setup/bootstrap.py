"""What `./plait` does before there is anything to run it with: prepares, then becomes the command.

Interpreter and packages are made here; the default model by the command that needs it. The command
`prepare` makes all three and needs no file outside `runtime/setup` but the version. A prepared
machine is recognised by a few file look-ups, without starting another program or taking the lock.
"""

import json
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from runtime.setup import interpreter as interpreters
from runtime.setup import packages
from runtime.setup.cache import Cache
from runtime.setup.children import Workshop
from runtime.setup.console import SetupError, say
from runtime.setup.interpreter import Interpreter, NotAvailable
from runtime.setup.packages import CannotCompile, Environment
from runtime.version import plait_version

ROOT = Path(__file__).resolve().parents[2]
USAGE = """\
Usage: ./plait [--python PROGRAM] COMMAND [ARGUMENTS]

  serve      serve a model over the OpenAI API
  capacity   report what this machine's GPUs can carry; loads nothing but with --measure
  chat       chat with a model in the terminal
  bench      measure a server by its answers
  test       run the test suite; arguments go to pytest
  run        run any program in the prepared environment: ./plait run python FILE
  prepare    prepare what the others need, and end; --tests: what test and run need, too

`./plait COMMAND --help` tells the options of the first four, `./plait --version` the
version.

The first command prepares an interpreter, the locked packages and a small model in the user's cache
folder, and says what it does; later ones start at once. --python (or PLAIT_PYTHON) names the
interpreter to use instead of the best one to be had.
"""
COMMANDS = ("serve", "capacity", "chat", "bench", "test", "run", "prepare")
_WITH_TEST_PACKAGES = ("test", "run")


def main(arguments: list[str]) -> int:
    """Runs `./plait ARGUMENTS`; returns, with an exit code, only if that could not be started."""
    try:
        return _main(arguments)
    except SetupError as error:
        say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        say("interrupted; the same command continues from here")
        return 128 + signal.SIGINT


def _main(arguments: list[str]) -> int:
    python = os.environ.get("PLAIT_PYTHON") or None
    words = list(arguments)
    if words and words[0].startswith("--python"):
        option, _, python = words.pop(0).partition("=")
        if option != "--python":
            return _misused(f"no such option: {option}")
        if not (python or words):
            return _misused("--python: the name of a program is missing")
        python = python or words.pop(0)
    if not words or words[0] in ("-h", "--help", "help") or words == ["prepare", "--help"]:
        print(USAGE)
        return 0
    if words[0] == "--version":
        print(f"plait {plait_version()}")
        return 0
    command, *rest = words
    if command not in COMMANDS:
        kind = "option" if command.startswith("-") else "command"
        return _misused(f"no such {kind}: {command}")
    if command == "run" and not rest:
        return _misused("run: the program is missing")
    if command == "prepare" and rest not in ([], ["--tests"]):
        return _misused(f"prepare: takes --tests or nothing, not {' '.join(rest)}")
    tests = command in _WITH_TEST_PACKAGES or (command == "prepare" and rest == ["--tests"])
    environment = prepare(Cache.of_user(os.environ), python, tests=tests)
    program = ["runtime.setup.model"] if command == "prepare" else ["runtime.cli", *words]
    become(environment, program, os.environ)


def _misused(reason: str) -> int:
    print(USAGE, file=sys.stderr)
    say(f"error: {reason}")
    return 2


def prepare(cache: Cache, python: str | None, *, tests: bool) -> Environment:
    """An environment with all packages. Raises SetupError."""
    known = _recall(cache, python)
    if known is not None and known.is_ready(tests=tests):
        return known
    with cache.lock() as lock:
        shop = Workshop(cache, lock, cache.environment(os.environ))
        environment = _prepare(shop, python, tests=tests)
        _remember(cache, python, environment.interpreter)
    return environment


def _prepare(shop: Workshop, python: str | None, *, tests: bool) -> Environment:
    say(f"preparing in {shop.cache.root}; the first time takes some minutes and 9 GB of room")
    if python is not None:
        found = interpreters.named(python)
        try:
            return _with(shop, found, tests=tests)
        except CannotCompile as reason:
            raise SetupError(str(reason), "Name another interpreter, or none.") from reason
    try:
        return _with(shop, interpreters.free_threaded(shop), tests=tests)
    except (CannotCompile, NotAvailable) as reason:
        found = interpreters.ordinary()
        say(f"warning: no free-threaded Python: {reason}")
        say(
            f"warning: going on with {found.executable}, whose threads share one core; with that "
            f"corrected, delete {_memo(shop.cache)} to try again"
        )
    return _with(shop, found, tests=tests)


def _with(shop: Workshop, interpreter: Interpreter, *, tests: bool) -> Environment:
    environment = Environment.of(shop.cache.root, interpreter)
    packages.prepare(shop, environment, tests=tests)
    return environment


def become(environment: Environment, program: list[str], environ: Mapping[str, str]) -> NoReturn:
    """Replaces this process by a module of the checkout, with its arguments, in `environment`."""
    sources = [str(ROOT), str(ROOT / "http"), str(ROOT / "kernels")]
    inherited = {k: v for k, v in environ.items() if k not in ("PYTHON_GIL", "PYTHONHOME")}
    own = {
        "PATH": os.pathsep.join([str(environment.folder / "bin"), environ.get("PATH", os.defpath)]),
        "PYTHONPATH": os.pathsep.join([*sources, *filter(None, [environ.get("PYTHONPATH")])]),
        "VIRTUAL_ENV": str(environment.folder),
        # mypy reads all of torch once, which takes minutes; every clone may profit from that.
        "MYPY_CACHE_DIR": environ.get("MYPY_CACHE_DIR", str(environment.folder / "mypy-cache")),
    }
    python = str(environment.python)
    # -P: the folder that the user happens to be in must not shadow modules.
    command = [python, "-P", "-m", *program]
    os.execve(python, command, inherited | own | packages.gil_off(environment.interpreter))


# --- which interpreter was chosen last time


def _memo(cache: Cache) -> Path:
    return cache.root / "interpreters.json"


def _memories(cache: Cache) -> dict[str, dict[str, Any]]:
    try:
        return dict(json.loads(_memo(cache).read_text()))
    except (OSError, ValueError):
        return {}


def _recall(cache: Cache, python: str | None) -> Environment | None:
    """The environment made for this choice of interpreter before, ready or not."""
    fields = _memories(cache).get(python or "")
    try:
        interpreter = (
            Interpreter(**(fields | {"version": tuple(fields["version"])})) if fields else None
        )
    except (TypeError, KeyError):
        return None
    return Environment.of(cache.root, interpreter) if interpreter else None


def _remember(cache: Cache, python: str | None, interpreter: Interpreter) -> None:
    memories = _memories(cache) | {python or "": asdict(interpreter)}
    aside = _memo(cache).with_suffix(".partial")
    aside.write_text(json.dumps(memories, indent=2) + "\n")
    aside.rename(_memo(cache))
