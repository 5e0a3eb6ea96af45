"""A run as a file: what was asked, of whom, and what it came to. `--compare` reads it again."""

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from client.bench.load import Sample

FORMAT: Final = "plait bench 1"


class NoRecord(Exception):
    """A file is no result of `plait bench`; one line says why."""


def write_record(
    path: Path,
    *,
    label: str,
    client: Mapping[str, Any],
    server: Mapping[str, Any],
    workload: Mapping[str, Any],
    figures: Mapping[str, Any],
    distributions: Mapping[str, Any],
    samples: Sequence[Sample],
) -> None:
    """Writes the file anew. The API key is in none of it."""
    record = {
        "format": FORMAT,
        "label": label,
        "command": " ".join(["plait", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "client": {
            "python": sys.version.split()[0],
            "cores": os.cpu_count(),
            **_versions(),
            **client,
        },
        "server": server,
        "workload": workload,
        "figures": figures,
        "distributions": distributions,
        "requests": _rows(samples),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    # What is under somebody's home is told as everybody's.
    text = json.dumps(record, indent=1).replace(str(Path.home()), "~")
    path.write_text(text + "\n", encoding="utf-8")


def _versions() -> dict[str, str]:
    found = {}
    for package in ("plait", "httpx", "h2"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _rows(samples: Sequence[Sample]) -> list[list[Any]]:
    """[sent_s, ttft_ms, e2e_ms, prompt tokens, output tokens, error], a request each."""
    first_s = min(sample.sent_s for sample in samples)
    return [
        [
            round(s.sent_s - first_s, 4),
            round((s.arrivals_s[0] - s.sent_s) * 1e3, 2) if s.arrivals_s else None,
            round((s.ended_s - s.sent_s) * 1e3, 2),
            s.prompt_tokens, s.output_tokens, s.error,
        ]
        for s in sorted(samples, key=lambda sample: sample.sent_s)
    ]  # fmt: skip


def read_record(path: Path) -> dict[str, Any]:
    """A file that `write_record` wrote. Raises NoRecord."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise NoRecord(f"{path} cannot be read: {error}") from error
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise NoRecord(f"{path} is no result of this version's `plait bench --json`")
    return record
