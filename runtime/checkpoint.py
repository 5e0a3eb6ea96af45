"""Where the model's files are: a folder, a name on the Hugging Face hub, or the default model."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

_HUB_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_WANTED: Final = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "*.txt")


def find_checkpoint(model: str | None) -> Path:
    """The folder with the model's files, downloaded where `model` is a hub's name.

    Raises ValueError where there is no such model.
    """
    return _default_model() if model is None else _find(model, _WANTED)


def find_config(model: str) -> Path:
    """A folder with the model's config.json, which is all that is downloaded for a hub's name.

    Raises ValueError where there is no such model.
    """
    return _find(model, ("config.json",))


def _find(model: str, wanted: Sequence[str]) -> Path:
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if _HUB_NAME.fullmatch(model) and not folder.exists():
        return _download(model, wanted)
    found = "this is a file" if folder.exists() else "there is no such folder"
    raise ValueError(f"model is {model}; it must be a folder or a name like org/model, and {found}")


def _default_model() -> Path:
    # Its own imports are of no use to a server that has a model.
    from runtime.setup.model import prepare_default

    return prepare_default()


def _download(name: str, wanted: Sequence[str]) -> Path:
    # Heavy, and of no use without a network.
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(wanted)))
    except Exception as error:  # the hub's client raises many kinds, of several libraries
        raise ValueError(
            f"model is {name}; there is no such folder, and the hub gives no such model: {error}"
        ) from error
