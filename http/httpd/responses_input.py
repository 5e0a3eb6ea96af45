"""The items of a response's `input`, as the messages that chat templates know.

An assistant's turn is several items there (reasoning, a message, calls) and one message here.
"""

from typing import Any, Final

from httpd.errors import invalid, unsupported, wrong_type
from httpd.json_types import object_of, required_role, required_string
from httpd.messages import MAX_TOOL_CALLS, read_arguments, read_content
from httpd.text import shown

ROLES: Final = ("user", "assistant", "system", "developer")

# Types of content parts here, and what chats call them.
_PARTS: Final = {"input_text": "text", "output_text": "text"}


def read_input(given: Any) -> tuple[dict[str, Any], ...]:
    """The messages, in the form that `messages.read_messages` gives.

    Raises `Rejected` (400) naming the first wrong place.
    """
    if isinstance(given, str):
        return ({"role": "user", "content": given},)
    if not isinstance(given, list):
        raise wrong_type("input", "a string or an array of items", given)
    if not given:
        raise invalid("Invalid 'input': empty array.", "input", "empty_array")
    messages = _Messages()
    for index, item in enumerate(given):
        messages.add(item, f"input[{index}]")
    return messages.end()


class _Messages:
    """The messages so far, and the assistant's turn that may go on. Owned by whoever parses."""

    def __init__(self) -> None:
        self._made: list[dict[str, Any]] = []
        self._turn: dict[str, Any] = {}  # of the assistant; empty: none is open

    def add(self, item: Any, path: str) -> None:
        kind = object_of(item, path).get("type")
        if kind is None or kind == "message":
            self._add_message(item, path)
        elif kind == "function_call":
            self._add_call(item, path)
        elif kind == "function_call_output":
            content = read_content(_renamed(item.get("output")), f"{path}.output")
            call_id = required_string(item, "call_id", path)
            self._append({"role": "tool", "content": content, "tool_call_id": call_id})
        elif kind == "reasoning":
            self._add_reasoning(item, path)
        else:
            raise unsupported(
                f"{path}.type",
                f"Unsupported value for '{path}.type': {shown(kind)}. Supported values are: "
                "message, function_call, function_call_output, reasoning.",
            )

    def end(self) -> tuple[dict[str, Any], ...]:
        """All messages."""
        self._close_turn()
        return tuple(self._made)

    def _append(self, message: dict[str, Any]) -> None:
        self._close_turn()
        self._made.append(message)

    def _close_turn(self) -> None:
        if self._turn:
            self._made.append({"role": "assistant", "content": None} | self._turn)
            self._turn = {}

    def _add_message(self, item: dict[str, Any], path: str) -> None:
        role = required_role(item, path, ROLES)
        content = _renamed(item.get("content"))
        if role != "assistant":
            content = read_content(content, f"{path}.content")
            return self._append({"role": role, "content": content})
        content = read_content(content, f"{path}.content", may_be_empty=True)
        if "content" in self._turn or "tool_calls" in self._turn:
            self._close_turn()
        self._turn["content"] = content

    def _add_call(self, item: dict[str, Any], path: str) -> None:
        function = {
            "name": required_string(item, "name", path),
            "arguments": read_arguments(item.get("arguments"), f"{path}.arguments"),
        }
        call_id = required_string(item, "call_id", path)
        calls = self._turn.setdefault("tool_calls", [])
        if len(calls) == MAX_TOOL_CALLS:
            raise invalid(
                f"Invalid '{path}': it is a call more than the {MAX_TOOL_CALLS} that one turn may "
                "have.",
                path,
                "array_above_max_length",
            )
        calls.append({"type": "function", "function": function, "id": call_id})

    def _add_reasoning(self, item: dict[str, Any], path: str) -> None:
        """Reasoning goes before what it led to; one without text, such as a summary, is dropped."""
        parts = [] if item.get("content") is None else item["content"]
        if not isinstance(parts, list):
            raise wrong_type(f"{path}.content", "an array", parts)
        text = "".join(_reasoning(part, f"{path}.content[{i}]") for i, part in enumerate(parts))
        if self._turn:
            self._close_turn()
        if text:
            self._turn["reasoning_content"] = text


def _reasoning(part: Any, path: str) -> str:
    return required_string(object_of(part, path), "text", path)


def _renamed(content: Any) -> Any:
    """Content whose text parts are called as in chats; whatever else it is stays as it is."""
    if not isinstance(content, list):
        return content
    return [_renamed_part(part) for part in content]


def _renamed_part(part: Any) -> Any:
    kind = part.get("type") if isinstance(part, dict) else None
    return {**part, "type": _PARTS[kind]} if isinstance(kind, str) and kind in _PARTS else part
