"""Which version of Plait this is."""

import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PYPROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"


def plait_version() -> str:
    """The version in pyproject.toml of a checkout, else of the installation."""
    if _PYPROJECT.is_file():
        stated: str = tomllib.loads(_PYPROJECT.read_text(encoding="utf-8"))["project"]["version"]
        return stated
    try:
        return version("plait")
    except PackageNotFoundError:
        return "unknown"
