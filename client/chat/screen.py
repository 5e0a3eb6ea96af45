"""Shows answers: as Markdown in a terminal, and as they are where the output goes to a file.

While an answer grows, what of it can still change is drawn again and again below, and what no
longer changes is printed once and for all: so it may be longer than the screen.
"""

from types import TracebackType
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment, Segments
from rich.text import Text

from client.terminal import printable

_WINDOW: Final = 6  # lines at the end that may change while text comes in
_REDRAW_S: Final = 0.08


class MarkdownView:
    """One growing answer in a terminal. Owned by the thread that prints."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._printed = 0  # lines that are there for good
        self._drawn_s = 0.0
        self._reasoning = self._content = ""

    def __enter__(self) -> "MarkdownView":
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        """Prints what is left, whatever ended the answer."""
        self._live.update(Text(""), refresh=True)
        self._live.stop()
        self._print(self._lines())

    def show(self, reasoning: str, content: str) -> None:
        """All of the answer so far."""
        self._reasoning, self._content = printable(reasoning), printable(content)
        now_s = self._console.get_time()
        if now_s - self._drawn_s < _REDRAW_S:
            return
        self._drawn_s = now_s
        lines = self._lines()
        steady = max(self._printed, len(lines) - _WINDOW)
        self._print(lines[:steady])
        self._live.update(_joined(lines[steady:]), refresh=True)

    def _print(self, lines: list[list[Segment]]) -> None:
        if len(lines) > self._printed:
            self._console.print(_joined(lines[self._printed :]), end="")
            self._printed = len(lines)

    def _lines(self) -> list[list[Segment]]:
        parts: list[RenderableType] = []
        if self._reasoning.strip():
            parts.append(Text(self._reasoning.strip(), style="dim italic"))
        if self._content.strip():
            parts.append(Markdown(self._content))
        if not parts:
            return []
        return self._console.render_lines(Group(*parts), pad=False)


def _joined(lines: list[list[Segment]]) -> Segments:
    return Segments(segment for line in lines for segment in (*line, Segment.line()))


class PlainView:
    """One growing answer as raw text. Owned by the thread that prints."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown = 0

    def __enter__(self) -> "PlainView":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self._write("\n")

    def show(self, reasoning: str, content: str) -> None:
        """Its content; reasoning goes nowhere."""
        new = content[self._shown :]
        self._write(printable(new) if self._console.is_terminal else new)
        self._shown = len(content)

    def _write(self, text: str) -> None:
        self._console.file.write(text)
        self._console.file.flush()
