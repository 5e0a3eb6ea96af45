"""Tools of a chat: what the model may call, what it must, and the grammar that makes it."""

import json
from dataclasses import dataclass
from typing import Any

from engine.grammar.spec import JsonSchema
from httpd.errors import invalid, unsupported, wrong_type
from httpd.fields import ChatFields
from httpd.json_types import object_of, string_of
from httpd.service import Constraint
from httpd.text import shown

MAX_NAME_CHARS = 64

# Keywords beside `properties` that let others in, or look at the same object with other eyes.
_OPENS = frozenset(
    ("additionalProperties", "unevaluatedProperties", "patternProperties", "$ref")
    + ("allOf", "anyOf", "oneOf", "not", "if")
)


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of one chat; with none, calls are content."""

    tools: tuple[dict[str, Any], ...] = ()  # as the template gets them
    names: tuple[str, ...] = ()  # that may be called
    must_call: bool = False  # tool_choice is `required` or names one
    is_named: bool = False
    parallel: bool = True

    def constraint(self) -> Constraint | None:
        """The grammar of calls that must come, None where none must."""
        if not self.must_call:
            return None
        taken: set[str] = set()
        functions = [tool["function"] for tool in self.tools]
        calls = [
            _call_schema(function, index, taken)
            for index, function in enumerate(functions)
            if function["name"] in self.names
        ]
        schema = calls[0] if len(calls) == 1 else {"anyOf": calls}
        if self.parallel and not self.is_named:
            schema = {"type": "array", "items": schema, "minItems": 1}
        return Constraint(JsonSchema(json.dumps(schema)), "tools")


def read_tools(fields: ChatFields) -> ToolUse:
    """The tools and which of them may or must be called. Raises `Rejected` (400)."""
    tools = tuple(_tool(tool, f"tools[{i}]") for i, tool in enumerate(fields.tools))
    return tool_use(tools, fields.tool_choice, parallel=fields.parallel_tool_calls)


def tool_use(tools: tuple[dict[str, Any], ...], choice: Any, *, parallel: bool) -> ToolUse:
    """What `choice` says of tools that `read_function` made. Raises `Rejected` (400)."""
    names = tuple(tool["function"]["name"] for tool in tools)
    twice = next((name for i, name in enumerate(names) if name in names[:i]), None)
    if twice is not None:
        raise invalid(f"Invalid 'tools': {shown(twice)} is there twice.", "tools", "invalid_value")
    if choice is None or choice == "auto":
        return ToolUse(tools, names, parallel=parallel)
    if choice == "none":
        return ToolUse(tools)
    if not tools:
        raise invalid(
            "Invalid 'tool_choice': there are no 'tools'.", "tool_choice", "invalid_value"
        )
    if choice == "required":
        return ToolUse(tools, names, must_call=True, parallel=parallel)
    if isinstance(choice, dict):
        name = _named(choice, names)
        return ToolUse(tools, (name,), must_call=True, is_named=True, parallel=False)
    if not isinstance(choice, str):
        raise wrong_type("tool_choice", "a string or an object", choice)
    raise unsupported(
        "tool_choice",
        f"Unsupported value for 'tool_choice': {shown(choice)}. Supported values are: none, auto, "
        "required, or an object that names a function.",
    )


def _tool(tool: Any, path: str) -> dict[str, Any]:
    check_is_function(tool, path)
    return read_function(tool.get("function"), f"{path}.function")


def check_is_function(tool: Any, path: str) -> None:
    """Raises `Rejected` (400) where the tool is of another type."""
    kind = object_of(tool, path).get("type")
    if kind != "function":
        raise unsupported(
            f"{path}.type",
            f"Unsupported value for '{path}.type': {shown(kind)}. Only functions can be called.",
        )


def read_function(function: Any, path: str, schema: str = "parameters") -> dict[str, Any]:
    """The tool as templates get it, of a function that the client has at `path`.

    schema  the client's name for the JSON schema of its parameters

    Raises `Rejected` (400).
    """
    name = string_of(object_of(function, path).get("name"), f"{path}.name")
    if not 0 < len(name) <= MAX_NAME_CHARS:
        raise invalid(
            f"Invalid '{path}.name': {shown(name)} has {len(name)} characters; it must have 1 to "
            f"{MAX_NAME_CHARS}.",
            f"{path}.name",
            "invalid_value",
        )
    description, parameters = function.get("description"), function.get(schema)
    if description is not None:
        string_of(description, f"{path}.description")
    if parameters is not None:
        object_of(parameters, f"{path}.{schema}")
    known = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": {k: v for k, v in known.items() if v is not None}}


def _named(choice: dict[str, Any], names: tuple[str, ...]) -> str:
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else choice.get("name")
    if choice.get("type") != "function":
        raise unsupported(
            "tool_choice.type",
            f"Unsupported value for 'tool_choice.type': {shown(choice.get('type'))}. Only a "
            "function can be named.",
        )
    if not isinstance(name, str):
        raise invalid("Invalid 'tool_choice': it names no function.", "tool_choice", "invalid_type")
    if name not in names:
        raise invalid(
            f"Invalid 'tool_choice': {shown(name)} is not among the tools.",
            "tool_choice",
            "invalid_value",
        )
    return name


def _call_schema(function: dict[str, Any], index: int, taken: set[str]) -> dict[str, Any]:
    """The schema of one call of the function at `index`.

    The parameters are not the root any more: so that their references mean what they meant, they
    get a base of their own where they have none, or one that is `taken` by another tool's.
    """
    parameters = _closed(function.get("parameters") or {"type": "object"})
    base = parameters.get("$id")
    if not isinstance(base, str) or base[:1] in ("", "#") or base in taken:
        base = f"plait:/tools/{index}"
    taken.add(base)
    return {
        "type": "object",
        "properties": {
            "name": {"const": function["name"]},
            "arguments": {**parameters, "$id": base, "id": base},  # the latter in draft 4
        },
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _closed(schema: Any) -> Any:
    """The schema without properties that it does not name, where it does not say that it has some.

    A model that may invent arguments goes on to do so, up to its last token.
    """
    if not isinstance(schema, dict):
        return schema
    closed = dict(schema)
    for place in ("properties", "$defs", "definitions"):
        if isinstance(schema.get(place), dict):
            closed[place] = {name: _closed(each) for name, each in schema[place].items()}
    if isinstance(schema.get("properties"), dict) and not _OPENS.intersection(schema):
        closed["additionalProperties"] = False
    for place in ("items", "additionalProperties"):
        if place in schema:
            closed[place] = _closed(schema[place])
    return closed
