"""The loop of a chat: reads a line, asks, shows the answer, until the user goes.

Ctrl-C stops an answer, and at the prompt only the line; Ctrl-D ends. Errors are shown and the
question is forgotten, so that the chat goes on as if it had not been asked.
"""

import atexit
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from client.chat.answer import Answer, NoAnswer
from client.chat.commands import Commands, End
from client.chat.conversation import Conversation
from client.chat.screen import MarkdownView, PlainView
from client.target import Target
from client.terminal import printable

PROMPT: Final = "> "
_HISTORY_LINES: Final = 1000

ReadLine = Callable[[str], str]  # of a prompt; raises EOFError, KeyboardInterrupt


class ChatSession:
    """One user's chat. Owned by the main thread, to which Ctrl-C comes."""

    def __init__(
        self, target: Target, chat: Conversation, console: Console, read: ReadLine,
        *, markdown: bool,
    ) -> None:  # fmt: skip
        self._target, self._chat, self._console, self._read = target, chat, console, read
        self._markdown = markdown
        self._commands = Commands(chat, self._say)
        self._all_answered = True

    def run(self) -> bool:
        """Until Ctrl-D or /exit; whether every question was answered."""
        while True:
            try:
                self._turn(self._read_all())
            except KeyboardInterrupt:
                self._console.print()
            except (EOFError, End):
                return self._all_answered

    def _read_all(self) -> str:
        r"""A line, and those after it while they end with \."""
        line = self._read(PROMPT)
        while line.endswith("\\"):
            line = line[:-1] + "\n" + self._read("… ")
        return line.strip()

    def _turn(self, line: str) -> None:
        question: str | None = line
        if line.startswith("//"):
            question = line[1:]
        elif line.startswith("/"):
            question = self._commands.run(line)
        if question:
            self._ask(question)

    def _ask(self, question: str) -> None:
        answer = Answer(self._target, self._chat.ask(question))
        stopped = False
        try:
            stopped = not self._show(answer)
        except NoAnswer as error:
            self._chat.take_back()
            self._all_answered = False
            self._complain(printable(str(error)))
            return
        self._chat.take(answer.content)
        said = ["stopped"] if stopped else []
        self._say(" · ".join([*said, *filter(None, [answer.summary()])]))

    def _show(self, answer: Answer) -> bool:
        """Whether it came to its end. Raises NoAnswer."""
        pieces = iter(answer)
        view: MarkdownView | PlainView
        view = MarkdownView(self._console) if self._markdown else PlainView(self._console)
        with view:
            try:
                for _ in pieces:
                    view.show(answer.reasoning, answer.content)
                return True
            except KeyboardInterrupt:
                return False
            finally:
                pieces.close()  # type: ignore[attr-defined]  # a generator: leaves the connection

    def _complain(self, text: str) -> None:
        """Beside the answers, where these go to another program."""
        console = self._console if self._console.is_terminal else Console(stderr=True)
        console.print(text, style="red", markup=False, highlight=False)

    def _say(self, text: str) -> None:
        """A word of the program's own; not where the output is for another program."""
        if self._console.is_terminal:
            self._console.print(text, style="dim", markup=False, highlight=False)


def line_reader(history: Path | None) -> ReadLine:
    """The keyboard, with line editing and a history where this Python has readline."""
    try:
        readline: Any = importlib.import_module("readline")
    except ImportError:  # a build without it: lines can still be typed
        return input
    if history is not None:
        _keep_history(readline, history)
    return input


def _keep_history(readline: Any, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)  # what people say to a model is nobody else's to read
        readline.read_history_file(path)
        readline.set_history_length(_HISTORY_LINES)
    except OSError:
        return
    atexit.register(readline.write_history_file, path)
