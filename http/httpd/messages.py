"""Chat messages: checked one by one, and reduced to the keys that a chat template may see.

The one form that templates know, of contents and roles, is engine.chat_template's to make.

Written by hand where fields.py uses pydantic: a union of roles and content forms makes pydantic's
errors name union branches, while clients need `messages[0].content[1]`.
"""

from typing import Any

from engine.request import TEXT_PARTS
from httpd.errors import invalid, unsupported, wrong_type
from httpd.json_types import object_of, required_role, required_string, string_of
from httpd.service import Rejected
from httpd.strict_json import parse_object
from httpd.text import shown

ROLES = ("system", "developer", "user", "assistant", "tool", "function")

MAX_TOOL_CALLS = 128  # in one message

# Optional string keys that templates use.
_PASSED = ("name", "reasoning_content")


def read_messages(messages: list[Any]) -> tuple[dict[str, Any], ...]:
    """The messages, of text alone and with arguments as objects where they parse.

    Raises `Rejected` (400) naming the first wrong place.
    """
    return tuple(read_message(message, f"messages[{i}]") for i, message in enumerate(messages))


def read_message(message: Any, path: str) -> dict[str, Any]:
    """One message, which the client has at `path`. Raises `Rejected` (400)."""
    role = required_role(object_of(message, path), path, ROLES)
    calls = _tool_calls(message.get("tool_calls"), path) if role == "assistant" else []
    may_be_empty = role == "assistant"
    read: dict[str, Any] = {
        "role": role,
        "content": read_content(
            message.get("content"), f"{path}.content", may_be_empty=may_be_empty
        ),
    }
    for name in _PASSED:
        if message.get(name) is not None:
            read[name] = string_of(message[name], f"{path}.{name}")
    if role == "tool":
        read["tool_call_id"] = required_string(message, "tool_call_id", path)
    if calls:
        read["tool_calls"] = calls
    return read


def read_content(content: Any, path: str, *, may_be_empty: bool = False, first: int = 0) -> Any:
    """The content as it is: text, text parts or, where it may be empty, None.

    first  where the client has the first of these parts

    Raises `Rejected` (400).
    """
    if isinstance(content, str) or (content is None and may_be_empty):
        return content
    if not isinstance(content, list):
        raise wrong_type(path, "a string or an array of content parts", content)
    if not content and not may_be_empty:
        raise invalid(f"Invalid '{path}': empty array.", path, "empty_array")
    for index, part in enumerate(content, first):
        _check_part(part, f"{path}[{index}]")
    return content


def _check_part(part: Any, path: str) -> None:
    kind = required_string(object_of(part, path), "type", path)
    if kind not in TEXT_PARTS:
        raise unsupported(
            path,
            f"Unsupported content part '{path}' of type {shown(kind)}: this model takes text only.",
        )
    required_string(part, kind, path)


def _tool_calls(calls: Any, path: str) -> list[dict[str, Any]]:
    """An assistant's earlier calls; an empty list counts as none: templates test for presence."""
    if calls is None:
        return []
    if not isinstance(calls, list):
        raise wrong_type(f"{path}.tool_calls", "an array", calls)
    if len(calls) > MAX_TOOL_CALLS:
        raise invalid(
            f"Invalid '{path}.tool_calls': {len(calls)} calls are more than {MAX_TOOL_CALLS}.",
            f"{path}.tool_calls",
            "array_above_max_length",
        )
    return [_tool_call(call, f"{path}.tool_calls[{i}]") for i, call in enumerate(calls)]


def _tool_call(call: Any, path: str) -> dict[str, Any]:
    kind = object_of(call, path).get("type")
    if kind not in (None, "function"):
        raise unsupported(
            f"{path}.type", f"Unsupported value for '{path}.type': {shown(kind)}. Only 'function'."
        )
    function = object_of(call.get("function"), f"{path}.function")
    name = required_string(function, "name", f"{path}.function")
    arguments = read_arguments(function.get("arguments"), f"{path}.function.arguments")
    read = {"type": "function", "function": {"name": name, "arguments": arguments}}
    if call.get("id") is not None:
        read["id"] = string_of(call["id"], f"{path}.id")
    return read


def read_arguments(arguments: Any, path: str) -> Any:
    """The arguments as an object, which templates print as JSON; text that is none stays text.

    A model wrote them, so they need not parse, and must not make the conversation unusable. Raises
    `Rejected` (400) for what is neither.
    """
    if arguments is None:
        return {}
    if isinstance(arguments, dict):
        return arguments
    text = string_of(arguments, path)
    try:
        return parse_object(text.encode()) if text.strip() else {}
    except Rejected:
        return text
