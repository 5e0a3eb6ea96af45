"""The calls of one response: their numbers and ids, and how the text of one is taken.

Once a call began nothing can be taken back: where its arguments break off or go wrong it ends with
what came, as OpenAI's own do, and clients see it when they parse the arguments.
"""

from collections.abc import Callable, Collection
from typing import Protocol

from httpd.parsing.json_value import JsonValue
from httpd.parsing.output import CallArguments, CallBegan, CallEnded, OutputEvent


class Calls:
    """Numbers and names the calls of one response. Owned by its HTTP loop."""

    __slots__ = ("_new_id", "count", "names")

    def __init__(self, names: Collection[str], new_id: Callable[[], str]) -> None:
        """names  of the request's tools"""
        self.names = frozenset(names)
        self._new_id = new_id
        self.count = 0  # calls begun

    def begin(self, name: str, out: list[OutputEvent]) -> int:
        """Tells of a new call and returns its index."""
        index = self.count
        self.count += 1
        out.append(CallBegan(index, self._new_id(), name))
        return index


class CallReader(Protocol):
    """Takes the text of one call. Owned by its HTTP loop."""

    done: bool

    @property
    def is_call(self) -> bool:
        """Whether it began; where it is `done` and did not, its text went out as content."""
        ...

    def feed(self, text: str, start: int, out: list[OutputEvent]) -> int:
        """Index in `text` after what it took."""
        ...

    def finish(self, out: list[OutputEvent]) -> None:
        """The text is over. Not for one that is `done`."""
        ...


class NamedCall:
    """A call whose name stood before it: what comes is its arguments. Owned by its HTTP loop."""

    __slots__ = ("_index", "_value", "done")

    is_call = True

    def __init__(self, calls: Calls, name: str, out: list[OutputEvent]) -> None:
        self._index = calls.begin(name, out)
        self._value = JsonValue()
        self.done = False

    def feed(self, text: str, start: int, out: list[OutputEvent]) -> int:
        end = self._value.feed(text, start)
        if end > start:
            out.append(CallArguments(self._index, text[start:end]))
        if self._value.done:
            self.finish(out)
        return end

    def finish(self, out: list[OutputEvent]) -> None:
        out.append(CallEnded(self._index))
        self.done = True
