"""The body of /v1/chat/completions."""

from dataclasses import replace
from typing import Any

from httpd.call import Call, Telling, telling_of
from httpd.conversation import Conversation, call_of, check_model, check_name
from httpd.errors import invalid, unsupported
from httpd.fields import ChatFields, read_fields, unknown_fields
from httpd.messages import read_messages
from httpd.service import ModelCard
from httpd.strict_json import parse_object
from httpd.structured import read_constraint
from httpd.text import shown
from httpd.tools import read_tools


def parse_chat(body: bytes, card: ModelCard) -> Call:
    """The checked call. Pure, so that a large body can be read on another thread.

    Raises `Rejected`: 400, or 404 for another model.
    """
    raw = parse_object(body)
    fields = read_fields(ChatFields, raw)
    check_name(card, fields.model)
    check_model(card, fields.messages, "messages")
    if not fields.add_generation_prompt and not fields.continue_final_message:
        raise unsupported(
            "add_generation_prompt",
            "Unsupported value for 'add_generation_prompt': false, unless "
            "'continue_final_message' is true.",
        )
    return call_of(
        fields,
        read_conversation(fields),
        card,
        _telling(fields),
        n=fields.n,
        logprobs=(fields.top_logprobs or 0) if fields.logprobs else None,
        prompt_logprobs=fields.prompt_logprobs,
        thinking_budget=fields.thinking_budget,
        unknown_fields=unknown_fields(ChatFields, raw),
    )


def read_conversation(fields: ChatFields) -> Conversation:
    """The checked messages, tools and answer's form. Raises `Rejected` (400)."""
    tools = read_tools(fields)
    messages = read_messages(fields.messages)
    kwargs: dict[str, Any] = {}
    if fields.chat_template_kwargs is not None:
        kwargs = fields.chat_template_kwargs.model_dump(exclude_none=True)
    return Conversation(
        messages,
        tools,
        read_constraint(fields),
        continue_final=_continues(fields, messages),
        template_kwargs=kwargs,
    )


def _continues(fields: ChatFields, messages: tuple[dict[str, Any], ...]) -> bool:
    """Whether the answer goes on where the last message ends."""
    if not fields.continue_final_message:
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


def _telling(fields: ChatFields) -> Telling:
    if fields.top_logprobs and not fields.logprobs:
        raise invalid(
            f"Invalid 'top_logprobs': {shown(fields.top_logprobs)} is only allowed where "
            "'logprobs' is true.",
            "top_logprobs",
            "invalid_value",
        )
    return replace(telling_of(fields), logprobs=fields.logprobs)
