"""What was said, and how the next answer is asked for. Knows neither network nor screen."""

import json
from dataclasses import dataclass, field
from typing import Any, Final

Message = dict[str, str]

_OURS: Final = frozenset({"messages", "model", "stream", "stream_options", "n"})


@dataclass
class Conversation:
    """A chat as it grows. Owned by the thread that reads the keyboard."""

    model: str
    system: str = ""
    settings: dict[str, Any] = field(default_factory=dict)  # fields of the request's body
    messages: list[Message] = field(default_factory=list)  # without the system prompt

    def ask(self, text: str) -> dict[str, Any]:
        """The body of a request for the answer to `text`, which is now part of the chat."""
        self.messages.append({"role": "user", "content": text})
        system = [{"role": "system", "content": self.system}] if self.system else []
        return {
            "model": self.model, "messages": [*system, *self.messages], "stream": True,
            "stream_options": {"include_usage": True}, **self.settings,
        }  # fmt: skip

    def take(self, answer: str) -> None:
        """The answer, or as much of it as came before it was stopped."""
        self.messages.append({"role": "assistant", "content": answer})

    def take_back(self) -> str | None:
        """Forgets the last question, and its answer if there was one; the question, if any."""
        while self.messages:
            message = self.messages.pop()
            if message["role"] == "user":
                return message["content"]
        return None

    def reset(self) -> None:
        """Forgets what was said; system prompt and settings stay."""
        self.messages.clear()

    def set(self, name: str, value: str) -> None:
        """Sets a field of the body: JSON, or text that is none; empty: the server's default again.

        Raises ValueError for what is not the user's to set.
        """
        if not name.isidentifier() or name in _OURS:
            raise ValueError(f"{name!r} cannot be set")
        if not value:
            self.settings.pop(name, None)
            return
        try:
            self.settings[name] = json.loads(value)
        except ValueError:
            self.settings[name] = value
