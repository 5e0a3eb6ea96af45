"""The body of /v1/responses: OpenAI's Responses API, without what would need a memory of others.

Items become messages here, and from there on it is a chat: see conversation.py.
"""

from typing import Annotated, Any, ClassVar, Final

from pydantic import BaseModel, ConfigDict, FailFast, Field

from engine.grammar.spec import JsonObject
from httpd.call import Call, Telling
from httpd.conversation import Conversation, call_of, check_model, check_name
from httpd.errors import invalid, unsupported
from httpd.fields import (
    IGNORED,
    MAX_TOOLS,
    Fields,
    TemplateKwargs,
    TokenCount,
    ToolChoice,
    TopLogprobs,
    read_fields,
    unknown_fields,
)
from httpd.json_types import object_of, required_string
from httpd.responses_input import read_input
from httpd.service import Constraint, ModelCard
from httpd.strict_json import parse_object
from httpd.structured import read_schema
from httpd.text import shown
from httpd.tools import ToolUse, check_is_function, read_function, tool_use

ID_PREFIX: Final = "resp_"
RENAMED: Final = {"messages": "input"}

LOGPROBS: Final = "message.output_text.logprobs"  # in `include`

MAX_INCLUDED: Final = 64
MAX_METADATA: Final = 16
MAX_METADATA_NAME_CHARS: Final = 64
MAX_METADATA_CHARS: Final = 512

MetadataName = Annotated[str, Field(max_length=MAX_METADATA_NAME_CHARS)]
MetadataValue = Annotated[str, Field(max_length=MAX_METADATA_CHARS)]


class Reasoning(BaseModel):
    """`reasoning`: whether there is any. What else it says changes nothing, and is repeated."""

    model_config = ConfigDict(strict=True, extra="allow")

    effort: str | None = None


class ResponseFields(Fields):
    """A body of /v1/responses; `input` is checked item by item in responses_input.py."""

    ignored = IGNORED | {"max_tool_calls", "stream_options"}
    neutral: ClassVar = {
        "previous_response_id": (),
        "conversation": (),
        "prompt": (),
        "background": (False,),
        "truncation": ("disabled",),
        "context_management": ([],),
    }

    input: Any
    instructions: str | None = None
    # LOGPROBS, or the name of a thing that there is none of here.
    include: Annotated[list[str], Field(max_length=MAX_INCLUDED), FailFast()] = Field(
        default_factory=list
    )
    max_output_tokens: TokenCount | None = None
    top_logprobs: TopLogprobs = 0
    tools: Annotated[list[Any], Field(max_length=MAX_TOOLS)] = Field(default_factory=list)
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool = True
    text: dict[str, Any] | None = None
    reasoning: Reasoning | None = None
    metadata: Annotated[dict[MetadataName, MetadataValue], Field(max_length=MAX_METADATA)] = Field(
        default_factory=dict
    )
    chat_template_kwargs: TemplateKwargs | None = None

    def token_limit(self) -> int | None:
        return self.max_output_tokens


def parse_response(body: bytes, card: ModelCard) -> Call:
    """The checked call. Pure, so that a large body can be read on another thread.

    Raises `Rejected`: 400, or 404 for another model.
    """
    raw = parse_object(body)
    fields = read_fields(ResponseFields, raw)
    check_name(card, fields.model)
    check_model(card, fields.input if isinstance(fields.input, list) else [], "input")
    wants_logprobs = LOGPROBS in fields.include
    if fields.top_logprobs and not wants_logprobs:
        raise invalid(
            f"Invalid 'top_logprobs': {fields.top_logprobs} is only allowed where 'include' has "
            f"'{LOGPROBS}'.",
            "top_logprobs",
            "invalid_value",
        )
    return call_of(
        fields,
        _conversation(fields),
        card,
        Telling(fields.stream, False, False, logprobs=wants_logprobs, echoed=_echoed(fields)),
        logprobs=fields.top_logprobs if wants_logprobs else None,
        unknown_fields=unknown_fields(ResponseFields, raw),
    )


def _conversation(fields: ResponseFields) -> Conversation:
    messages = read_input(fields.input)
    if fields.instructions:
        messages = ({"role": "system", "content": fields.instructions}, *messages)
    return Conversation(
        messages, _tools(fields), _answer(fields.text or {}), template_kwargs=_kwargs(fields)
    )


def _kwargs(fields: ResponseFields) -> dict[str, Any]:
    kwargs: dict[str, Any] = {}
    if fields.reasoning is not None and fields.reasoning.effort == "none":
        kwargs["enable_thinking"] = False
    if fields.chat_template_kwargs is not None:
        kwargs |= fields.chat_template_kwargs.model_dump(exclude_none=True)
    return kwargs


def _tools(fields: ResponseFields) -> ToolUse:
    tools = tuple(_tool(tool, f"tools[{i}]") for i, tool in enumerate(fields.tools))
    return tool_use(tools, fields.tool_choice, parallel=fields.parallel_tool_calls)


def _tool(tool: Any, path: str) -> dict[str, Any]:
    """A function's tool; its keys are the tool's own here, not those of an inner object."""
    check_is_function(tool, path)
    return read_function(tool, path)


def _answer(text: dict[str, Any]) -> Constraint | None:
    """What `text.format` says that the answer must be."""
    form, path = text.get("format"), "text.format"
    if form is None:
        return None
    kind = required_string(object_of(form, path), "type", path)
    if kind == "text":
        return None
    if kind == "json_object":
        return Constraint(JsonObject(), path)
    if kind == "json_schema":
        if form.get("schema") is None:
            raise invalid(
                f"Missing required parameter: '{path}.schema'.",
                f"{path}.schema",
                "missing_required_parameter",
            )
        return Constraint(read_schema(form["schema"], f"{path}.schema"), f"{path}.schema")
    raise unsupported(
        f"{path}.type",
        f"Unsupported value for '{path}.type': {shown(kind)}. Supported values are: text, "
        "json_object, json_schema.",
    )


def _echoed(fields: ResponseFields) -> dict[str, Any]:
    """What the answer's object repeats of the request."""
    reasoning = {} if fields.reasoning is None else fields.reasoning.model_dump()
    return {
        "background": False,
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "metadata": fields.metadata,
        "parallel_tool_calls": fields.parallel_tool_calls,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None} | reasoning,
        "service_tier": "default",
        "store": False,
        "temperature": fields.temperature,
        "text": {"format": {"type": "text"}} | {k: v for k, v in (fields.text or {}).items() if v},
        "tool_choice": "auto" if fields.tool_choice is None else fields.tool_choice,
        "tools": [{"parameters": None, "strict": False} | tool for tool in fields.tools],
        "top_logprobs": fields.top_logprobs,
        "top_p": fields.top_p,
        "truncation": "disabled",
    }
