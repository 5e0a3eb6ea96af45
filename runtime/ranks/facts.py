"""What ranks must have in common before they load anything: settings, checkpoint, versions.

Read from files' headers and package metadata, without torch: it takes a moment.
"""

import dataclasses
import hashlib
import importlib.metadata
import json
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from engine.config import EngineConfig
from engine.descriptor import VERSION
from runtime.version import plait_version

Facts = dict[str, str]

_PACKAGES: Final = ("torch", "numpy", "safetensors")
_MOST_HEADER: Final = 100 << 20  # bytes, as safetensors itself allows
# Of a rank's own machine, not of what is computed; the checkpoint has a fingerprint.
_OWN: Final = ("device", "cpu_threads", "memory_fraction", "model")
# Of each file, spread over all of it: another checkpoint of the same shapes differs in any of them.
_SAMPLES: Final = 16
_SAMPLE_BYTES: Final = 4096


def facts_of(config: EngineConfig) -> Facts:
    """What this rank would serve, and by what; equal on all ranks that fit together."""
    facts = {f"package {name}": importlib.metadata.version(name) for name in _PACKAGES}
    facts |= {
        f"setting {field.name}": str(getattr(config, field.name))
        for field in dataclasses.fields(config)
        if field.name not in _OWN
    }
    facts |= {
        "Plait": plait_version(),
        "Python": platform.python_version(),
        "descriptor version": str(VERSION),
        "checkpoint": fingerprint(config.model),
    }
    return facts


def fingerprint(folder: Path) -> str:
    """A digest of config.json, and of each safetensors file's size, header and some of its data."""
    digest = hashlib.sha256()
    for file in sorted([folder / "config.json", *folder.glob("*.safetensors")]):
        digest.update(f"{file.name} {file.stat().st_size}\n".encode())
        digest.update(_telling(file))
    return digest.hexdigest()[:16]


def _telling(file: Path) -> bytes:
    if file.suffix != ".safetensors":
        return file.read_bytes()
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        parts = [opened.read(min(size, _MOST_HEADER))]
        whole = file.stat().st_size
        for sample in range(_SAMPLES):
            opened.seek(whole * sample // _SAMPLES)
            parts.append(opened.read(_SAMPLE_BYTES))
    return b"".join(parts)


def difference(rank: int, facts: Mapping[str, object], own: Facts) -> str | None:
    """How a rank's facts differ from rank 0's, in one line; None where they are the same."""
    for name in sorted({*facts, *own}):
        if facts.get(name) != own.get(name):
            here, there = (json.dumps(one.get(name)) for one in (own, facts))
            return f"ranks differ: {name} is {here} on rank 0 and {there} on rank {rank}"
    return None
