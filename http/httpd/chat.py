"""The body of /v1/chat/completions."""

from dataclasses import replace
from functools import partial
from typing import Any

from engine.request import ChatPrompt
from httpd.call import Call, Telling, sampling, telling_of
from httpd.errors import invalid, unknown_model, unsupported
from httpd.fields import ChatFields, read_fields, unknown_fields
from httpd.messages import read_messages
from httpd.parsing.formats import ToolsFormat, parser_for, reasoning_markers
from httpd.service import Constraint, ModelCard
from httpd.strict_json import parse_object
from httpd.structured import read_constraint
from httpd.text import shown
from httpd.tools import ToolUse, read_tools

# Their markers of calls are special tokens.
_SPECIAL_MARKERS = (ToolsFormat.LLAMA3, ToolsFormat.MISTRAL)


def parse_chat(body: bytes, card: ModelCard) -> Call:
    """The checked call. Pure, so that a large body can be read on another thread.

    Raises `Rejected`: 400, or 404 for another model.
    """
    raw = parse_object(body)
    fields = read_fields(ChatFields, raw)
    if fields.model != card.id:
        raise unknown_model(fields.model)
    tools = read_tools(fields)
    prompt = _prompt(fields, tools, card)
    reads_calls = bool(tools.names) and card.formats.tools in _SPECIAL_MARKERS
    params = replace(
        sampling(fields, card, default_tokens=card.max_model_len),
        logprobs=(fields.top_logprobs or 0) if fields.logprobs else None,
        reasoning=reasoning_markers(card.formats),
        skip_special_tokens=fields.skip_special_tokens and not reads_calls,
    )
    return Call.of(
        fields,
        (prompt,),
        params,
        _telling(fields, tools, card),
        constraint=_constraint(fields, tools),
        unknown_fields=unknown_fields(ChatFields, raw),
    )


def _prompt(fields: ChatFields, tools: ToolUse, card: ModelCard) -> ChatPrompt:
    if not card.has_chat_template:
        raise unsupported(
            "messages", "This model has no chat template; use /v1/completions instead."
        )
    if len(fields.messages) > card.max_model_len:  # each takes a token at least
        raise invalid(
            f"This model's maximum context length is {card.max_model_len} tokens; the request has "
            f"{len(fields.messages)} messages.",
            "messages",
            "context_length_exceeded",
        )
    messages = read_messages(fields.messages)
    kwargs: dict[str, Any] = {}
    if fields.chat_template_kwargs is not None:
        kwargs = fields.chat_template_kwargs.model_dump(exclude_none=True)
    if tools.tools:
        kwargs["tools"] = list(tools.tools)
    return ChatPrompt(messages, kwargs, continue_final=_continues(fields, messages))


def _continues(fields: ChatFields, messages: tuple[dict[str, Any], ...]) -> bool:
    """Whether the answer goes on where the last message ends."""
    if not fields.continue_final_message:
        if not fields.add_generation_prompt:
            raise unsupported(
                "add_generation_prompt",
                "Unsupported value for 'add_generation_prompt': false, unless "
                "'continue_final_message' is true.",
            )
        return False
    last = messages[-1]
    if last["role"] != "assistant" or not last["content"]:
        raise invalid(
            "Invalid 'continue_final_message': the last message is not an assistant's, or is "
            "empty.",
            "continue_final_message",
            "invalid_value",
        )
    return True


def _telling(fields: ChatFields, tools: ToolUse, card: ModelCard) -> Telling:
    if fields.top_logprobs and not fields.logprobs:
        raise invalid(
            f"Invalid 'top_logprobs': {shown(fields.top_logprobs)} is only allowed where "
            "'logprobs' is true.",
            "top_logprobs",
            "invalid_value",
        )
    return replace(
        telling_of(fields),
        logprobs=fields.logprobs,
        new_parser=partial(
            parser_for, card.formats, tool_names=tools.names, only_calls=tools.must_call
        ),
        named_call=tools.is_named,
        parallel_calls=tools.parallel,
    )


def _constraint(fields: ChatFields, tools: ToolUse) -> Constraint | None:
    asked, calls = read_constraint(fields), tools.constraint()
    if asked is not None and calls is not None:
        raise invalid(
            f"Invalid '{asked.param}': 'tool_choice' already says that the answer is a call.",
            asked.param,
            "invalid_value",
        )
    return asked or calls
