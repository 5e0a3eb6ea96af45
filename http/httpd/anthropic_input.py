"""The turns of an Anthropic conversation, as the messages that chat templates know.

A turn's results of tools, which are blocks of the user's there, are messages of their own here.
"""

from typing import Any, Final

from httpd.errors import invalid
from httpd.json_types import object_of, required_role, required_string
from httpd.messages import MAX_TOOL_CALLS, read_content

ROLES: Final = ("user", "assistant", "system")

_Message = dict[str, Any]


def read_turns(turns: list[Any]) -> tuple[_Message, ...]:
    """The messages, at least one, in the form that `messages.read_messages` gives.

    Raises `Rejected` (400) naming the first wrong place.
    """
    return tuple(
        message for i, turn in enumerate(turns) for message in _turn(turn, f"messages[{i}]")
    )


def _turn(turn: Any, path: str) -> list[_Message]:
    role = required_role(object_of(turn, path), path, ROLES)
    content, at = turn.get("content"), f"{path}.content"
    if not isinstance(content, list):
        return [{"role": role, "content": read_content(content, at)}]
    if role == "assistant":
        return [_assistant(content, at)]
    return _results_and_text(role, content, at)


def _results_and_text(role: str, blocks: list[Any], path: str) -> list[_Message]:
    """Results one by one, and between them the text blocks that stand together."""
    made: list[_Message] = []
    if not blocks:
        read_content(blocks, path)  # which says that it is empty
    for index, block in enumerate(blocks):
        at = f"{path}[{index}]"
        if _kind(block, at) == "tool_result":
            made.append(_result(block, at))
            continue
        (part,) = read_content([block], path, first=index)
        if made and made[-1]["role"] == role:
            made[-1]["content"].append(part)
        else:
            made.append({"role": role, "content": [part]})
    return made


def _result(block: dict[str, Any], path: str) -> _Message:
    call_id, content = required_string(block, "tool_use_id", path), block.get("content")
    content = read_content("" if content in (None, []) else content, f"{path}.content")
    return {"role": "tool", "content": content, "tool_call_id": call_id}


def _assistant(blocks: list[Any], path: str) -> _Message:
    thoughts, parts, calls = [], [], []
    for index, block in enumerate(blocks):
        at = f"{path}[{index}]"
        match _kind(block, at):
            case "thinking":
                thoughts.append(required_string(block, "thinking", at))
            case "redacted_thinking":
                pass  # of another server's
            case "tool_use":
                calls.append(_call(block, at))
            case _:
                parts += read_content([block], path, first=index)
    if len(calls) > MAX_TOOL_CALLS:
        raise invalid(
            f"Invalid '{path}': {len(calls)} calls are more than {MAX_TOOL_CALLS}.",
            path,
            "array_above_max_length",
        )
    message: _Message = {"role": "assistant", "content": parts or None}
    if any(thoughts):
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _call(block: dict[str, Any], path: str) -> dict[str, Any]:
    given = object_of(block.get("input", {}), f"{path}.input")
    function = {"name": required_string(block, "name", path), "arguments": given}
    return {"type": "function", "function": function, "id": required_string(block, "id", path)}


def _kind(block: Any, path: str) -> str:
    return required_string(object_of(block, path), "type", path)
