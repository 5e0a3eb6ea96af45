"""The cache folder, its lock, and the programs that run in it."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.setup.cache import Cache
from runtime.setup.children import Failed, Workshop
from runtime.setup.console import SetupError, size


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "plait")


def is_locked(cache: Cache) -> bool:
    with (cache.root / "setup.lock").open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@pytest.mark.parametrize(
    ("value", "root"),
    [
        ("/data/cache", Path("/data/cache/plait")),
        ("", Path.home() / ".cache" / "plait"),
        ("relative", Path.home() / ".cache" / "plait"),
    ],
)
def test_the_cache_folder_follows_xdg(value: str, root: Path) -> None:
    assert Cache.of_user({"XDG_CACHE_HOME": value}).root == root


def test_a_cache_folder_that_cannot_be_made_is_an_error_with_advice(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SetupError, match="cannot write(.|\n)*XDG_CACHE_HOME"):
        Cache(tmp_path / "file" / "plait").folder("logs")


def test_children_keep_their_files_in_the_cache(cache: Cache) -> None:
    environ = cache.environment({"PYTHON_GIL": "0", "HOME": "/home/me"})
    assert "PYTHON_GIL" not in environ
    assert environ["HOME"] == "/home/me"
    for name in ("TMPDIR", "CARGO_HOME", "UV_PYTHON_INSTALL_DIR", "UV_PYTHON_BIN_DIR"):
        assert Path(environ[name]).is_relative_to(cache.root)
    assert cache.environment({"CARGO_HOME": "/mine"})["CARGO_HOME"] == "/mine"


def test_output_goes_to_the_log_and_a_line_to_the_screen(
    cache: Cache, capsys: pytest.CaptureFixture[str]
) -> None:
    with cache.lock() as lock:
        shop = Workshop(cache, lock, os.environ)
        shop.run("Saying", ["sh", "-c", "echo one; echo two >&2"], log="say")
    assert cache.log("say").read_text().splitlines()[1:] == ["one", "two"]
    assert "plait: Saying" in capsys.readouterr().err


def test_a_failure_carries_the_last_lines(cache: Cache) -> None:
    with cache.lock() as lock:
        shop = Workshop(cache, lock, os.environ)
        script = "for i in $(seq 100); do echo line $i; done; printf 'no newline'; exit 3"
        with pytest.raises(Failed) as caught:
            shop.run("Failing", ["sh", "-c", script], log="fail")
    assert caught.value.tail[-2:] == ("line 100", "no newline")
    assert "ended with code 3" in caught.value.explain()
    assert str(cache.log("fail")) in caught.value.explain()


def test_the_lock_is_held_for_as_long_as_a_child_runs(cache: Cache) -> None:
    """A set-up that was killed leaves its pip at work; the next one must wait for that."""
    program = (
        "import os, signal, subprocess, sys; from pathlib import Path\n"
        "from runtime.setup.cache import Cache\n"
        "from runtime.setup.children import Workshop\n"
        "cache = Cache(Path(sys.argv[1]))\n"
        "with cache.lock() as lock:\n"
        '    script = f\'kill -9 {os.getpid()}; echo killed > "$0"; read line < "$1"\'\n'
        "    Workshop(cache, lock, os.environ).run(\n"
        "        'Dying', ['sh', '-c', script, *sys.argv[2:]], log='die')\n"
    )
    said, gate = cache.folder() / "said", cache.folder() / "gate"
    os.mkfifo(said)
    os.mkfifo(gate)
    command = [sys.executable, "-c", program, str(cache.root), str(said), str(gate)]
    parent = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    assert said.read_text() == "killed\n"
    assert parent.wait(timeout=60) == -9
    assert is_locked(cache)
    gate.write_text("go\n")
    with cache.lock():  # waits for the orphan to end
        assert is_locked(cache)
    assert not is_locked(cache)


@pytest.mark.parametrize(
    ("count", "text"), [(999, "1 kB"), (93_000_000, "93 MB"), (2_530_000_000, "2.5 GB")]
)
def test_sizes_are_in_the_units_that_people_use(count: int, text: str) -> None:
    assert size(count) == text
