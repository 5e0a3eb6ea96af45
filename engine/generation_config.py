"""Which token ids end a generation, from a checkpoint's JSON files. Does not load the tokenizer."""

import json
from pathlib import Path
from typing import Any

from engine.errors import ModelError


def eos_ids(folder: Path) -> tuple[int, ...]:
    """Every id that any of the checkpoint's files calls the end, lowest first; may be empty.

    generation_config.json, config.json and the tokenizer's eos_token are taken together: chat
    models often name the end of a turn in one and the end of a text in another. Raises ModelError
    where a file is not what it should be.
    """
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        config = read_json(folder / name)
        for holder in (config, config.get("text_config")):
            if isinstance(holder, dict):
                found |= _ids(holder.get("eos_token_id"), folder / name)
    return tuple(sorted(found | _tokenizers_own(folder)))


def _tokenizers_own(folder: Path) -> set[int]:
    config = read_json(folder / "tokenizer_config.json")
    text = token_text(config.get("eos_token"))
    if text is None:
        return set()
    listed = config.get("added_tokens_decoder") or {}
    try:
        found = {int(key) for key, token in listed.items() if token_text(token) == text}
    except (AttributeError, ValueError) as error:
        file = folder / "tokenizer_config.json"
        raise ModelError(
            f"{file}: added_tokens_decoder must be an object from id to token: {error}"
        ) from error
    return found or _added_ids(folder / "tokenizer.json", text)


def _added_ids(file: Path, text: str) -> set[int]:
    """Of the big file, which takes a tenth of a second a few MB: only where need be."""
    added = read_json(file).get("added_tokens") or []
    try:
        return {int(token["id"]) for token in added if token["content"] == text}
    except (LookupError, TypeError, ValueError) as error:
        raise ModelError(
            f"{file}: added_tokens must be a list of tokens with id and content: {error!r}"
        ) from error


def _ids(value: Any, file: Path) -> set[int]:
    values = value if isinstance(value, list) else [] if value is None else [value]
    for each in values:
        if type(each) is not int or each < 0:
            raise ModelError(
                f"{file}: eos_token_id is {value!r}; it must be an id or a list of ids"
            )
    return set(values)


def token_text(value: Any) -> str | None:
    """A special token's text in tokenizer_config.json, where it is written in two forms."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def read_json(file: Path) -> dict[str, Any]:
    """The object in `file`, empty where there is no such file. Raises ModelError for others."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file} is not valid JSON: {error}") from error
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file} does not hold a JSON object")
    return value
