"""/v1/chat/completions: its body and the shape of its answer."""

import json
from typing import Any

from engine.request import ChatPrompt
from httpd.answer import End, Identity
from httpd.call import Call
from httpd.errors import invalid, unknown_model, unsupported
from httpd.fields import ChatFields, read_fields, unknown_fields
from httpd.messages import read_messages
from httpd.service import ModelCard
from httpd.strict_json import parse_object
from httpd.text import json_string, json_text, well_formed

ID_PREFIX = "chatcmpl-"


def parse_chat(body: bytes, card: ModelCard) -> Call:
    """The checked call. Pure, so that a large body can be read on another thread.

    Raises `Rejected`: 400, or 404 for another model.
    """
    raw = parse_object(body)
    fields = read_fields(ChatFields, raw)
    if fields.model != card.id:
        raise unknown_model(fields.model)
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
    kwargs = fields.chat_template_kwargs
    prompt = ChatPrompt(
        messages=read_messages(fields.messages),
        template_kwargs=kwargs.model_dump(exclude_none=True) if kwargs else {},
    )
    unknown = unknown_fields(ChatFields, raw)
    default = card.max_model_len
    return Call.of(fields, prompt, card, default_tokens=default, unknown_fields=unknown)


class ChatShape:
    """Chat objects and chunks. Immutable."""

    def __init__(self, identity: Identity) -> None:
        self._head = json.loads(identity.head("chat.completion") + "}")
        head = identity.head("chat.completion.chunk")
        self._empty = f'data: {head},"choices":[]'
        self._choice = f'data: {head},"choices":[{{"index":0,"delta":'

    def opening(self, usage: str) -> str:
        """The role, said once: clients add up what each delta brings."""
        delta = '{"role":"assistant","content":""}'
        return f'{self._choice}{delta},"logprobs":null,"finish_reason":null}}]{usage}}}\n\n'

    def text(self, text: str, usage: str) -> str:
        """One content delta."""
        delta = f'{{"content":{json_string(text)}}}'
        return f'{self._choice}{delta},"logprobs":null,"finish_reason":null}}]{usage}}}\n\n'

    def closing(self, end: End, usage: str) -> str:
        """An empty delta with the finish reason."""
        fields = json_text(end.fields())[1:]
        return f'{self._choice}{{}},"logprobs":null,{fields}]{usage}}}\n\n'

    def last_usage(self, usage: str) -> str:
        """Usage without a choice."""
        return f"{self._empty}{usage}}}\n\n"

    def whole(self, text: str, end: End, usage: dict[str, Any]) -> dict[str, Any]:
        """A chat.completion object; no `tool_calls` key, since there are none."""
        message = {"role": "assistant", "content": well_formed(text), "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, **end.fields()}
        return {**self._head, "choices": [choice], "usage": usage}
