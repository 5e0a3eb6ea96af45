"""What is given back only once the steps in flight no longer name it.

A step that was launched may still read the pages and the row of a request that has ended, and may
still write its last token. Giving them back early hands one request's memory to another.
"""

from dataclasses import dataclass

from engine.prefix_cache import Node
from engine.request import Int32Array


@dataclass(frozen=True, slots=True)
class Held:
    """Pages, and with them perhaps a row and a cache lock, that wait for `step` to complete."""

    step: int
    pages: Int32Array
    row: int | None = None
    node: Node | None = None
    unlocks: int = 0  # pages that the lock protects: perhaps free to evict once it is gone


class Fence:
    """Keeps what ended until its step has completed. Owned by the engine thread."""

    def __init__(self) -> None:
        self._held: list[Held] = []
        self.completed_step = 0  # and all before it
        self.pages = 0  # pages about to come back, or about to be free to evict (at most)
        self.rows = 0  # rows held

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, held: Held) -> None:
        self._held.append(held)
        self.pages += len(held.pages) + held.unlocks
        self.rows += held.row is not None

    def complete(self, step: int) -> None:
        """The step, which is the next, is done: its tokens are here."""
        assert step == self.completed_step + 1
        self.completed_step = step

    def release(self) -> list[Held]:
        """What no launched step names any more, in the order in which it came."""
        if not self._held:
            return []
        completed = self.completed_step
        done = [held for held in self._held if held.step <= completed]
        if done:
            self._held = [held for held in self._held if held.step > completed]
            self.pages -= sum(len(held.pages) + held.unlocks for held in done)
            self.rows -= sum(held.row is not None for held in done)
        return done

    def all_pages(self) -> list[Int32Array]:
        return [held.pages for held in self._held]
