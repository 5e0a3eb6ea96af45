"""Keys from files and from the environment; never from the command line, which every user sees.

What is wrong with a key is told by its place, not by its text.
"""

import logging
import os
import stat
from collections.abc import Iterable, MutableMapping
from pathlib import Path
from typing import Final

from httpd.auth import Keyring

log = logging.getLogger(__name__)

API_KEYS: Final = "PLAIT_API_KEYS"
ADMIN_KEYS: Final = "PLAIT_ADMIN_KEYS"

MAX_FILE_BYTES: Final = 1 << 20
MAX_KEY_CHARS: Final = 512  # far within the limit of a request's headers


def take_keys(
    file: Path | None, variable: str, environ: MutableMapping[str, str] = os.environ
) -> Keyring:
    """The keys in `file`, one a line, and those in the variable, between commas or white space.

    Takes the variable out of the environment, which child processes inherit. Raises ValueError for
    a file or a variable without a key: whoever gives one wants no open server.
    """
    keys = [] if file is None else _from_file(file)
    text = environ.pop(variable, None)
    if text is not None:
        keys += _from_variable(variable, text)
    return Keyring.of(keys)


def _from_file(file: Path) -> list[str]:
    try:
        with file.open("rb") as opened:
            mode = os.fstat(opened.fileno()).st_mode
            content = opened.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ValueError(f"the key file {file} cannot be read: {error.strerror}") from error
    if len(content) > MAX_FILE_BYTES:
        raise ValueError(f"the key file {file} has more than {MAX_FILE_BYTES} bytes")
    if mode & stat.S_IROTH:
        log.warning("the key file %s can be read by every user of this machine: chmod 600 it", file)
    lines = content.decode("utf-8", "replace").splitlines()
    keys = [
        _checked(line.strip(), f"line {number} of the key file {file}")
        for number, line in enumerate(lines, 1)
        if line.strip() and not line.lstrip().startswith("#")
    ]
    return _some(keys, f"the key file {file}")


def _from_variable(variable: str, text: str) -> list[str]:
    words = text.replace(",", " ").split()
    keys = [_checked(word, f"key {number} of {variable}") for number, word in enumerate(words, 1)]
    return _some(keys, variable)


def _checked(key: str, place: str) -> str:
    """The key, if a header can carry it."""
    if len(key) > MAX_KEY_CHARS:
        raise ValueError(f"{place} has {len(key)} characters; a key has at most {MAX_KEY_CHARS}")
    if not _is_visible_ascii(key):
        raise ValueError(f"{place} is no key: it must consist of visible ASCII characters")
    return key


def _is_visible_ascii(characters: Iterable[str]) -> bool:
    return all("!" <= character <= "~" for character in characters)


def _some(keys: list[str], place: str) -> list[str]:
    if not keys:
        raise ValueError(f"{place} holds no key")
    return keys
