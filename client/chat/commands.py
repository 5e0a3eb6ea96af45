"""What begins with a slash: commands to the chat itself."""

from collections.abc import Callable
from typing import Final

from client.chat.conversation import Conversation

HELP: Final = """\
/reset          forget what was said; system prompt and settings stay
/system [TEXT]  show, or set, the system prompt; "/system -" removes it
/set [NAME [VALUE]]  show the settings, or set a field of the request: /set temperature 0.2;
                without a value, the server's default again
/retry          ask the last question again
/help           this
/exit           end; so does Ctrl-D. Ctrl-C stops an answer.
A line that ends with \\ goes on in the next. // begins a message that starts with a slash."""


class End(Exception):
    """The user wants to go."""


class Commands:
    """Carries out commands. Owned by the thread that reads the keyboard."""

    def __init__(self, chat: Conversation, say: Callable[[str], None]) -> None:
        self._chat, self._say = chat, say

    def run(self, line: str) -> str | None:
        """Does what `line` says; a question where it asks one. Raises End."""
        name, _, rest = line[1:].partition(" ")
        known: dict[str, Callable[[str], str | None]] = {
            "help": lambda _: self._say(HELP),
            "reset": self._reset,
            "system": self._system,
            "set": self._set,
            "retry": self._retry,
            "exit": self._exit,
            "quit": self._exit,
        }
        if name not in known:
            self._say(f"There is no /{name}; /help tells what there is.")
            return None
        return known[name](rest.strip())

    def _reset(self, _rest: str) -> None:
        self._chat.reset()
        self._say("Nothing was said.")

    def _system(self, rest: str) -> None:
        if rest:
            self._chat.system = "" if rest == "-" else rest
        self._say(f"System prompt: {self._chat.system or 'none'}")

    def _set(self, rest: str) -> None:
        name, _, value = rest.partition(" ")
        try:
            if name:
                self._chat.set(name, value.strip())
        except ValueError as error:
            self._say(f"{error}.")
            return
        settings = ", ".join(f"{key} {value!r}" for key, value in self._chat.settings.items())
        self._say(f"Settings: {settings or 'all as the server likes'}")

    def _retry(self, _rest: str) -> str | None:
        question = self._chat.take_back()
        if question is None:
            self._say("Nothing was asked yet.")
        return question

    def _exit(self, _rest: str) -> None:
        raise End
