"""The body of /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API.

Blocks become the messages of a chat, and from there on it is one: see conversation.py.
"""

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from engine.request import ChatPrompt
from engine.sampling_limits import INT32_MAX
from httpd.anthropic_input import read_turns
from httpd.call import Call, Telling
from httpd.conversation import Conversation, call_of, check_model, check_name
from httpd.errors import unsupported
from httpd.fields import (
    MAX_TOOLS,
    Fields,
    StopStrings,
    TokenCount,
    read_fields,
    unknown_fields,
)
from httpd.json_types import object_of, required_string
from httpd.messages import read_content
from httpd.service import Constraint, ModelCard
from httpd.strict_json import parse_object
from httpd.structured import read_schema
from httpd.text import shown
from httpd.tools import ToolUse, read_function, tool_use

ID_PREFIX: Final = "msg_"

# Types of `tool_choice`, and what chats call them.
_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}


class Thinking(BaseModel):
    """`thinking`: whether the model may reason, and for how many tokens."""

    model_config = ConfigDict(strict=True)

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = None


class Choice(BaseModel):
    """`tool_choice`."""

    model_config = ConfigDict(strict=True)

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class MessageFields(Fields):
    """A body of /v1/messages; the messages are checked one by one in anthropic_input.py."""

    ignored = frozenset(
        {
            "cache_control",
            "context_management",
            "diagnostics",
            "inference_geo",
            "metadata",
            "service_tier",
            "speed",
            "user_profile_id",
            "workspace_id",
        }
    )
    neutral = {"container": (), "mcp_servers": ([],)}

    messages: Annotated[list[Any], Field(min_length=1)]
    max_tokens: TokenCount
    system: Any = None
    stop: StopStrings = Field(default_factory=list, alias="stop_sequences")
    tools: Annotated[list[Any], Field(max_length=MAX_TOOLS)] = Field(default_factory=list)
    tool_choice: Choice = Choice(type="auto")
    thinking: Thinking | None = None
    output_config: dict[str, Any] = Field(default_factory=dict)

    def token_limit(self) -> int | None:
        return self.max_tokens


def parse_message(body: bytes, card: ModelCard) -> Call:
    """The checked call. Pure, so that a large body can be read on another thread.

    Raises `Rejected`: 400, or 404 for another model.
    """
    raw = parse_object(body)
    fields = read_fields(MessageFields, raw)
    return call_of(
        fields,
        _conversation(fields, card),
        card,
        Telling(fields.stream, False, False),
        thinking_budget=None if fields.thinking is None else fields.thinking.budget_tokens,
        unknown_fields=unknown_fields(MessageFields, raw),
    )


def parse_count(body: bytes, card: ModelCard) -> ChatPrompt:
    """The prompt whose tokens are to be counted. Raises `Rejected` as `parse_message` does."""
    fields = read_fields(MessageFields, {**parse_object(body), "max_tokens": 1})
    return _conversation(fields, card).prompt()


def _conversation(fields: MessageFields, card: ModelCard) -> Conversation:
    check_name(card, fields.model)
    check_model(card, fields.messages, "messages")
    messages = read_turns(fields.messages)
    last = messages[-1]
    if fields.system is not None:
        content = read_content(fields.system, "system", may_be_empty=True)
        messages = ({"role": "system", "content": content}, *messages) if content else messages
    return Conversation(
        messages,
        _tools(fields),
        _answer(fields.output_config),
        # A last message of the assistant's is how its answer begins.
        continue_final=last["role"] == "assistant" and bool(last["content"]),
        template_kwargs=_kwargs(fields.thinking),
    )


def _kwargs(thinking: Thinking | None) -> dict[str, Any]:
    return {} if thinking is None else {"enable_thinking": thinking.type != "disabled"}


def _tools(fields: MessageFields) -> ToolUse:
    tools = tuple(_tool(tool, f"tools[{i}]") for i, tool in enumerate(fields.tools))
    choice = fields.tool_choice
    asked: Any = _CHOICES.get(choice.type)
    if choice.type == "tool":
        name = required_string({"name": choice.name}, "name", "tool_choice")
        asked = {"type": "function", "name": name}
    return tool_use(tools, asked, parallel=not choice.disable_parallel_tool_use)


def _tool(tool: Any, path: str) -> dict[str, Any]:
    kind = object_of(tool, path).get("type")
    if kind not in (None, "custom"):
        raise unsupported(
            f"{path}.type",
            f"Unsupported value for '{path}.type': {shown(kind)}. Only tools of the "
            "client's own can be called.",
        )
    return read_function(tool, path, schema="input_schema")


def _answer(config: dict[str, Any]) -> Constraint | None:
    """What `output_config.format` says that the answer must be."""
    form, path = config.get("format"), "output_config.format"
    if form is None:
        return None
    if object_of(form, path).get("type") != "json_schema":
        raise unsupported(
            f"{path}.type",
            f"Unsupported value for '{path}.type': {shown(form.get('type'))}. Only 'json_schema'.",
        )
    return Constraint(read_schema(form.get("schema"), f"{path}.schema"), f"{path}.schema")
