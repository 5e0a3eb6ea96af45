"""What a load asks for: sessions of turns, each with its own time.

A turn is one request. Those of a session follow each other, and each carries all that was said
before: what a chat or an agent does, and what a prefix cache is for. Most workloads are sessions of
one turn.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"

CountTokens = Callable[[str], int]  # of a text


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session."""

    prompt: tuple[int, ...] | str  # what is new in it: token ids, or text
    output_tokens: int  # at most; exactly, where EOS is ignored
    pause_s: float = 0.0  # after the answer before it: a tool that runs, a person who reads


@dataclass(frozen=True, slots=True)
class Session:
    """Turns one after the other."""

    turns: tuple[Turn, ...]
    at_s: float | None = None  # when the first is sent, after the start; None: once there is room
    system: str = ""


@dataclass(frozen=True, slots=True)
class Sampling:
    """What every request of a load says besides its prompt."""

    chat: bool  # texts go to chat completions; ids go to completions in any case
    ignore_eos: bool = True
    temperature: float = 0.0

    def body(self, model: str, turn: Turn) -> dict[str, Any]:
        more = {"ignore_eos": True} if self.ignore_eos else {}  # unknown to some servers
        return {
            "model": model, "temperature": self.temperature, "max_tokens": turn.output_tokens,
            "stream": True, "stream_options": {"include_usage": True}, **more,
        }  # fmt: skip


class History:
    """What a session has said so far. Owned by its load thread."""

    def __init__(self, session: Session, sampling: Sampling, model: str) -> None:
        self._sampling, self._model = sampling, model
        self._ids: list[int] = []
        system = [{"role": "system", "content": session.system}] if session.system else []
        self._messages = [*system]
        self._text = session.system

    def ask(self, turn: Turn) -> tuple[str, dict[str, Any]]:
        """The path and the body of the next request, which ends with `turn`."""
        body = self._sampling.body(self._model, turn)
        if not isinstance(turn.prompt, str):
            # The ids of the answers are not told: prompts grow by their own alone.
            self._ids.extend(turn.prompt)
            return COMPLETIONS, {**body, "prompt": list(self._ids)}
        if self._sampling.chat:
            self._messages.append({"role": "user", "content": turn.prompt})
            return CHAT, {**body, "messages": list(self._messages)}
        self._text += turn.prompt
        return COMPLETIONS, {**body, "prompt": self._text}

    def take(self, answer: str) -> None:
        self._text += answer
        self._messages.append({"role": "assistant", "content": answer})


def turns_in(sessions: Sequence[Session]) -> int:
    return sum(len(session.turns) for session in sessions)
