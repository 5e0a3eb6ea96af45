"""The virtual environment of one interpreter: exactly the locked packages, verified by hash.

Wheels are first collected in batches (downloaded, or built from source where none fits), so that an
interrupted set-up loses one batch at most; then all are unpacked at once. The environment is shared
by every clone whose lock is the same. It does not contain Plait itself: that runs from the
checkout.
"""

import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from runtime.setup.cache import is_complete, mark_complete
from runtime.setup.children import Failed, Workshop
from runtime.setup.console import SetupError, say, size
from runtime.setup.interpreter import Interpreter

LOCKS = Path(__file__).parent / "locks"
_BATCH = 5
# Measured with the locks of November 2026: 3 GB of wheels, 5 GB unpacked, both there for a while.
_ROOM_BYTES = 9_000_000_000
# No wheels for free-threaded 3.13; built first, because a machine that cannot build them needs
# another interpreter and would have downloaded the rest in vain.
_FROM_SOURCE = ("tokenizers", "safetensors")
# Likewise, but it asks for a newer Rust, and a server can do without: it then refuses requests for
# constrained output.
_OPTIONAL = ("llguidance",)
_RUST = {"tokenizers": "1.80", "safetensors": "1.80", "llguidance": "1.87"}
_IMPORTS = "import torch, transformers, tokenizers, safetensors, gguf, starlette, hypercorn"


class CannotCompile(Exception):
    """What has no wheel for this interpreter cannot be built on this machine; one line."""


@dataclass(frozen=True, slots=True)
class Pin:
    """One package of a lock, and the lines that say so."""

    name: str
    lines: str


def read_lock(text: str) -> list[Pin]:
    """The packages of a lock, in its order."""
    entries = re.findall(r"(?m)^[A-Za-z0-9].*(?:\n[ \t]+.*)*", text)
    return [Pin(re.split(r"[=\s\[;]", entry, maxsplit=1)[0].lower(), entry) for entry in entries]


def batches(pins: Sequence[Pin]) -> list[list[Pin]]:
    """What is built from source first, then the rest in handfuls."""
    first = [pin for pin in pins if pin.name in _FROM_SOURCE]
    second = [pin for pin in pins if pin.name in _OPTIONAL]
    rest = [pin for pin in pins if pin.name not in _FROM_SOURCE + _OPTIONAL]
    handfuls = [rest[start : start + _BATCH] for start in range(0, len(rest), _BATCH)]
    return [batch for batch in (first, second, *handfuls) if batch]


@dataclass(frozen=True, slots=True)
class Environment:
    """A place for packages, filled or not."""

    folder: Path
    interpreter: Interpreter

    @staticmethod
    def of(root: Path, interpreter: Interpreter) -> "Environment":
        """The environment under the cache folder `root` of this interpreter and lock."""
        identity = (LOCKS / "runtime.txt").read_bytes() + interpreter.executable.encode()
        name = f"{interpreter.tag}-{hashlib.sha256(identity).hexdigest()[:12]}"
        return Environment(root / "venvs" / name, interpreter)

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def is_ready(self, *, tests: bool) -> bool:
        # The link dangles once a system upgrade has replaced the interpreter.
        ready = self.python.exists() and is_complete(self.folder)
        return ready and (not tests or is_complete(self.folder, _tests_part()))


def prepare(shop: Workshop, environment: Environment, *, tests: bool) -> None:
    """Fills `environment`. Raises CannotCompile, or SetupError for lack of network, room, …"""
    try:
        if not environment.is_ready(tests=False):
            _fill(shop, environment)
        if tests and not environment.is_ready(tests=True):
            known = {pin.name for pin in read_lock((LOCKS / "runtime.txt").read_text())}
            pins = read_lock((LOCKS / "test.txt").read_text())
            _install(shop, environment, [pin for pin in pins if pin.name not in known], "test")
            mark_complete(environment.folder, _tests_part())
    except Failed as failure:
        raise SetupError(
            f"the packages could not be installed: {failure.explain()}",
            "If the package index is out of reach, check the network (HTTPS_PROXY, PIP_INDEX_URL), "
            "then run the same command again: it continues where it stopped.",
        ) from failure


def _tests_part() -> str:
    return "-tests-" + hashlib.sha256((LOCKS / "test.txt").read_bytes()).hexdigest()[:12]


def _fill(shop: Workshop, environment: Environment) -> None:
    free = shutil.disk_usage(shop.cache.folder("venvs")).free
    if free < _ROOM_BYTES:
        raise SetupError(
            f"{shop.cache.root} has {size(free)} free; the packages need {size(_ROOM_BYTES)}",
            "Make room, or choose another place with XDG_CACHE_HOME=/some/folder.",
        )
    if environment.interpreter.free_threaded and shutil.which("cargo") is None:
        names = " and ".join(_FROM_SOURCE)
        raise CannotCompile(
            f"{names} need cargo, best of Rust {_RUST['llguidance']} or later (rustup)"
        )
    # An interrupted pip leaves packages that look installed: unpacking always starts afresh.
    command = [environment.interpreter.executable, "-m", "venv", "--clear", str(environment.folder)]
    shop.run(f"Creating {environment.folder}", command, log="packages")
    pip = ["install", "--no-deps", "--require-hashes", "-r", str(LOCKS / "pip.txt")]
    _pip(shop, environment, "Updating pip (2 MB)", pip)
    _install(shop, environment, read_lock((LOCKS / "runtime.txt").read_text()), "runtime")
    shop.run(
        "Trying the packages",
        [str(environment.python), "-c", _IMPORTS],
        log="packages",
        environ=gil_off(environment.interpreter),
    )
    mark_complete(environment.folder)


def gil_off(interpreter: Interpreter) -> dict[str, str]:
    """Keeps the GIL off whatever is imported (triton 3.6 turns it on); GIL builds refuse it."""
    return {"PYTHON_GIL": "0"} if interpreter.free_threaded else {}


def _install(shop: Workshop, environment: Environment, pins: list[Pin], kind: str) -> None:
    house = shop.cache.folder("wheels", f"{environment.folder.name}-{kind}")
    todo = batches(pins)
    for number, batch in enumerate(todo, start=1):
        names = ", ".join(pin.name for pin in batch)
        _collect(shop, environment, house, batch, f"Packages {number}/{len(todo)}: {names}")
    wheels = sorted(house.glob("*.whl"))
    total = sum(path.stat().st_size for path in wheels)
    exact = ["{}=={}".format(*path.name.split("-")[:2]) for path in wheels]
    options = ["--no-index", f"--find-links={house}", "--no-deps", "--force-reinstall"]
    _pip(
        shop,
        environment,
        f"Unpacking {len(wheels)} packages, {size(total)} packed",
        ["install", *options, *exact],
    )
    shutil.rmtree(house)


def _collect(
    shop: Workshop, environment: Environment, house: Path, batch: list[Pin], title: str
) -> None:
    """Puts the wheels of a batch into `house`, unless an earlier attempt has."""
    lock = "\n".join(pin.lines for pin in batch) + "\n"
    part = "-" + hashlib.sha256(lock.encode()).hexdigest()[:12]
    if is_complete(house, part):
        return
    requirements = house / "batch.txt"
    requirements.write_text(lock)
    options = ["--no-deps", "--require-hashes", "--progress-bar=raw", f"--wheel-dir={house}"]
    try:
        _pip(shop, environment, title, ["wheel", *options, "-r", str(requirements)])
    except Failed as failure:
        if not environment.interpreter.free_threaded or batch[0].name not in (
            _FROM_SOURCE + _OPTIONAL
        ):
            raise
        names = " and ".join(pin.name for pin in batch)
        problem = f"{names} could not be built, which takes Rust {_RUST[batch[0].name]} or later"
        if batch[0].name in _FROM_SOURCE:
            raise CannotCompile(f"{problem} (see {failure.log})") from failure
        say(f"{problem} (see {failure.log}): requests for constrained output will be refused.")
    mark_complete(house, part)


def _pip(shop: Workshop, environment: Environment, title: str, words: list[str]) -> None:
    shop.run(
        title,
        [str(environment.python), "-m", "pip", *words],
        log="packages",
        environ=gil_off(environment.interpreter) | _rust_toolchain(),
        describe=PipStatus(),
    )


def _rust_toolchain() -> dict[str, str]:
    """Has rustup take what is installed, also for a source that names a toolchain of its own."""
    if "RUSTUP_TOOLCHAIN" in os.environ or shutil.which("rustup") is None:
        return {}
    command = ["rustup", "show", "active-toolchain"]
    shown = subprocess.run(command, cwd="/", capture_output=True, text=True)
    words = shown.stdout.split()
    return {"RUSTUP_TOOLCHAIN": words[0]} if shown.returncode == 0 and words else {}


class PipStatus:
    """What pip's output says to somebody who waits. Owned by the main thread."""

    def __init__(self) -> None:
        self._name = ""

    def __call__(self, line: str) -> str | None:
        """A status for one line of output, or None where it has nothing new to say."""
        progress = re.match(r"\s*Progress (\d+) of (\d+)", line)
        if progress:
            return f"downloading {self._name}: {size(int(progress[1]))} of {size(int(progress[2]))}"
        download = re.match(r"\s*Downloading (\S+?)-\S+ \(", line)
        if download:
            self._name = download[1]
            return f"downloading {self._name}"
        build = re.match(r"\s*Building wheel for (\S+)", line)
        if build:
            return f"building {build[1]}"
        return "writing files" if line.startswith("Installing collected packages") else None
