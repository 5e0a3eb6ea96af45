"""Where benchmarks put their figures: JSON with the command, commit, machine and versions."""

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent / "results"
PACKAGES = (
    "torch",
    "numpy",
    "triton",
    "transformers",
    "flashinfer-python",
    "hypercorn",
    "starlette",
)


def save(name: str, figures: dict[str, Any], device: str | None = None) -> Path:
    """Writes perf/results/NAME.json and returns its path.

    device  the accelerator in words, where there was one
    """
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{name}.json"
    record = {
        "command": "python -m " + " ".join([_module(), *sys.argv[1:]]),
        "commit": _commit(),
        "date": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "machine": {"cpu": _cpu(), "cores": os.cpu_count(), "accelerator": device},
        "python": sys.version.split()[0],
        "gil": getattr(sys, "_is_gil_enabled", lambda: True)(),
        "versions": _versions(),
        "figures": figures,
    }
    # What is under somebody's home is told as everybody's.
    text = json.dumps(record, indent=1).replace(str(Path.home()), "~")
    path.write_text(text.replace(f"{tempfile.gettempdir()}/", "$TMPDIR/") + "\n")
    return path


def _module() -> str:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec.name if spec else Path(sys.argv[0]).name


def _commit() -> str:
    """The commit, with a mark where the tree differs from it in more than results."""
    try:
        commit = _git("rev-parse", "--short", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no", ":/", f":!{FOLDER}")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{commit}-dirty" if changed else commit


def _git(*arguments: str) -> str:
    run = subprocess.run(
        ["git", *arguments], cwd=FOLDER.parent, capture_output=True, text=True, check=True
    )
    return run.stdout.strip()


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
