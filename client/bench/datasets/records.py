"""Reading JSON and JSON Lines files whose every record is an object; says which record is wrong."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class BadFile(Exception):
    """A dataset's file cannot be used; one line names the record and what is wrong with it."""


def read_records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, record) for each element of a JSON list, or each line of a .jsonl. Raises BadFile."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadFile(f"{path} cannot be read: {error}") from error
    lines = path.suffix == ".jsonl" or not text.lstrip().startswith("[")
    for number, record in _parse_lines(path, text) if lines else _parse_list(path, text):
        where = f"{path}, {'line' if lines else 'record'} {number}"
        if not isinstance(record, dict):
            raise BadFile(f"{where}: not an object")
        yield where, record


def _parse_lines(path: Path, text: str) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except ValueError as error:
                raise BadFile(f"{path}, line {number}: no JSON: {error}") from error


def _parse_list(path: Path, text: str) -> Iterator[tuple[int, Any]]:
    try:
        yield from enumerate(json.loads(text), 1)
    except ValueError as error:
        raise BadFile(f"{path}: no JSON: {error}") from error


def number_of(where: str, record: dict[str, Any], name: str, default: float | None = None) -> float:
    """A number that is not negative. Raises BadFile."""
    value = record.get(name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
        raise BadFile(f"{where}: {name!r} is {value!r}; it must be a number of at least 0")
    return float(value)


def text_in(where: str, record: dict[str, Any], name: str, default: str | None = None) -> str:
    """A string. Raises BadFile."""
    value = record.get(name, default)
    if not isinstance(value, str):
        raise BadFile(f"{where}: {name!r} is {value!r}; it must be a string")
    return value
