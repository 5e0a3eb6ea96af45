"""Keys from files and variables: which are taken, and what is told of those that are not."""

import logging
from pathlib import Path

import pytest

from httpd.auth import Keyring
from runtime.keys import API_KEYS, MAX_FILE_BYTES, MAX_KEY_CHARS, take_keys


def key_file(folder: Path, content: bytes, mode: int = 0o600) -> Path:
    file = folder / "keys"
    file.write_bytes(content)
    file.chmod(mode)
    return file


@pytest.mark.parametrize(
    "content",
    [b"sk-one\nsk-two\n", b"sk-one\r\nsk-two", b"# ours\n\n  sk-one \n\t# theirs\nsk-two\n\n"],
)
def test_a_file_has_a_key_a_line(tmp_path: Path, content: bytes) -> None:
    assert take_keys(key_file(tmp_path, content), API_KEYS, {}) == Keyring.of(["sk-one", "sk-two"])


@pytest.mark.parametrize("text", ["sk-one,sk-two", "sk-one sk-two", " sk-one,\n sk-two,\n"])
def test_a_variable_is_taken_out_of_the_environment(text: str) -> None:
    environ = {API_KEYS: text, "PATH": "/bin"}
    assert take_keys(None, API_KEYS, environ) == Keyring.of(["sk-one", "sk-two"])
    assert environ == {"PATH": "/bin"}


def test_file_and_variable_add_up_and_nothing_is_no_keys(tmp_path: Path) -> None:
    file = key_file(tmp_path, b"sk-one")
    assert take_keys(file, API_KEYS, {API_KEYS: "sk-two"}) == Keyring.of(["sk-one", "sk-two"])
    assert take_keys(None, API_KEYS, {}) == Keyring()


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "holds no key"),
        (b"\n  \n# sk-secret\n", "holds no key"),
        (b"sk-one\nsk-secret of mine\n", "line 2 of the key file .* is no key"),
        ("sk-s\u00e9cret".encode(), "line 1 of"),
        (b"sk-secret\xff", "line 1 of"),
        (b"sk-secret\x00", "line 1 of"),
        (b"k" * (MAX_KEY_CHARS + 1), f"has 513 characters; a key has at most {MAX_KEY_CHARS}"),
        (b"k\n" * MAX_FILE_BYTES, f"has more than {MAX_FILE_BYTES} bytes"),
    ],
)
def test_a_wrong_file_is_told_without_its_keys(tmp_path: Path, content: bytes, told: str) -> None:
    with pytest.raises(ValueError, match=told) as caught:
        take_keys(key_file(tmp_path, content), API_KEYS, {})
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "told"),
    [("", "PLAIT_API_KEYS holds no key"), (" , ", "holds no key"), ("sk-a,\x01secret", "key 2 of")],
)
def test_a_wrong_variable_is_told_without_its_keys(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told) as caught:
        take_keys(None, API_KEYS, {API_KEYS: text})
    assert "secret" not in str(caught.value)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    for missing in (tmp_path / "none", tmp_path):
        with pytest.raises(ValueError, match="cannot be read"):
            take_keys(missing, API_KEYS, {})


@pytest.mark.parametrize(("mode", "lines"), [(0o600, 0), (0o640, 0), (0o644, 1)])
def test_a_file_that_everyone_can_read_is_told_once(
    tmp_path: Path, mode: int, lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        take_keys(key_file(tmp_path, b"sk-one\nsk-two", mode), API_KEYS, {})
    assert caplog.text.count("can be read by every user") == lines
    assert "sk-" not in caplog.text
