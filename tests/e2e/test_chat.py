"""`plait chat` as people use it: in a terminal, against a server, with Ctrl-C and Ctrl-D."""

import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from runtime.setup.model import default_folder
from tests.server_process import ROOT, SOON_S, START_S, ServerProcess

CHAT = [sys.executable, "-m", "runtime.cli", "chat"]


class Terminal:
    """A program in a pseudo terminal, and what it wrote. Owned by the test."""

    def __init__(self, *arguments: str, state: Path) -> None:
        self._ours, theirs = pty.openpty()
        environ = {
            **os.environ, "PYTHON_GIL": "0", "TERM": "xterm", "COLUMNS": "80", "LINES": "24",
            "XDG_STATE_HOME": str(state), "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        self.process = subprocess.Popen(
            [*CHAT, *arguments], cwd=ROOT, env=environ, stdin=theirs, stdout=theirs, stderr=theirs,
            preexec_fn=lambda: _take_terminal(theirs),
        )  # fmt: skip
        os.close(theirs)
        self.text = ""

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def wait_for(self, pattern: str, timeout_s: float = SOON_S) -> str:
        """All that came up to where `pattern` was, which is then forgotten."""
        deadline_s = time.monotonic() + timeout_s
        while (found := re.search(pattern, self.text, re.DOTALL)) is None:
            left_s = deadline_s - time.monotonic()
            assert left_s > 0, f"never said {pattern!r}:\n{self.text!r}"
            if select.select([self._ours], [], [], left_s)[0]:
                try:
                    self.text += os.read(self._ours, 65536).decode(errors="replace")
                except OSError as error:  # the program has ended
                    raise AssertionError(f"ended before {pattern!r}:\n{self.text!r}") from error
        seen, self.text = self.text[: found.end()], self.text[found.end() :]
        return seen

    def wait_end(self) -> int:
        return self.process.wait(SOON_S)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._ours)


def _take_terminal(theirs: int) -> None:
    os.setsid()
    import fcntl
    import termios

    fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)  # so that Ctrl-C becomes a signal


@contextmanager
def chatting(state: Path, *arguments: str) -> Iterator[Terminal]:
    terminal = Terminal(*arguments, state=state)
    try:
        yield terminal
    finally:
        terminal.close()


def test_a_chat(tiny: ServerProcess, tmp_path: Path) -> None:
    with chatting(tmp_path, "--url", tiny.url, "--set", "ignore_eos=true") as terminal:
        terminal.wait_for("tiny.*/help for help.*> ", START_S)
        terminal.type("/set max_tokens 12\n")
        terminal.wait_for("max_tokens 12")
        terminal.type("Hello\n")
        terminal.wait_for(r"12 tokens · .*first after [\d.]+ s · prompt \d+, \d+ cached")
        terminal.type("/set temperature 9\nAnd?\n")
        terminal.wait_for("400: .*temperature")
        terminal.type("/set temperature\n/retry\n")
        terminal.wait_for("12 tokens.*> ")  # Ctrl-D before a prompt is there would get lost
        terminal.type("\x04")
        assert terminal.wait_end() == 0
    history = tmp_path / "plait" / "chat_history"
    if history.is_file():  # where this Python has readline
        assert "/set max_tokens 12" in history.read_text() and not history.stat().st_mode & 0o77


def test_ctrl_c_stops_the_answer_and_the_server(tiny: ServerProcess, tmp_path: Path) -> None:
    tiny.wait_at_rest(SOON_S)
    endless = ["--url", tiny.url, "--set", "ignore_eos=true", "--max-tokens", "3500"]
    with chatting(tmp_path, *endless) as terminal:
        terminal.wait_for("> ", START_S)
        terminal.type("Go on and on\n")
        terminal.wait_for(r"\x1b\[2K")  # some of it was drawn, and is drawn again
        assert tiny.occupancy()["running"] == 1
        terminal.type("\x03")
        # Nothing is typed before the prompt is back: Ctrl-C throws away what was typed before it,
        # and so does a terminal whose mode is being changed.
        terminal.wait_for("stopped.*> ")
        tiny.wait_at_rest()
        terminal.type("never sent\x03")
        terminal.wait_for("> ")
        terminal.type("still there\\\n/x\n")
        terminal.wait_for(r"\x1b\[2K")
        terminal.type("\x03")
        terminal.wait_for("stopped.*> ")
        tiny.wait_at_rest(SOON_S)
        terminal.type("/exit\n")
        assert terminal.wait_end() == 0


def test_output_for_another_program(tiny: ServerProcess) -> None:
    asked = [*CHAT, "--url", tiny.url, "--set", "ignore_eos=true", "--max-tokens", "5"]
    environ = {**os.environ, "PYTHON_GIL": "0"}
    done = subprocess.run(
        asked, input=b"one\ntwo\n", capture_output=True, timeout=START_S, cwd=ROOT, env=environ
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(b"\n") >= 2 and b"tokens" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--url", "http://127.0.0.1:9"], "does not answer"),
        (["--model", "/nowhere/at/all"], "must be a folder"),
    ],
)
def test_nobody_to_talk_to(arguments: list[str], said: str) -> None:
    done = subprocess.run(
        [*CHAT, *arguments], capture_output=True, text=True, timeout=START_S, cwd=ROOT,
        stdin=subprocess.DEVNULL, env={**os.environ, "PYTHON_GIL": "0"},
    )  # fmt: skip
    assert done.returncode == 1 and said in done.stderr


@pytest.mark.model
def test_a_model_of_its_own(tmp_path: Path) -> None:
    folder = default_folder()
    if not folder.is_dir():
        pytest.skip(f"{folder} is not prepared: ./plait test does that")
    asked = ["--model", str(folder), "--device", "cpu", "--temperature", "0", "--max-tokens", "12"]
    with chatting(tmp_path, *asked) as terminal:
        terminal.wait_for("SmolLM2-135M-Instruct.*/help for help.*> ", START_S)
        terminal.type("What is the capital of France?\n")
        assert "Paris" in terminal.wait_for(r"tokens · [\d.]+ tokens/s.*> ", START_S)
        terminal.type("\x04")
        assert terminal.wait_end() == 0
