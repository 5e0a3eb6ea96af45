"""The call for one conversation, whichever endpoint's words it came in.

Chat, responses and messages each read their own body; what they found is put together here, so
that one model's formats and limits are the same for all. Knows no body.
"""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from engine.request import ChatPrompt
from httpd.call import Call, Telling, sampling
from httpd.errors import invalid, unknown_model, unsupported
from httpd.fields import Fields
from httpd.parsing.formats import ToolsFormat, parser_for, reasoning_markers
from httpd.service import Constraint, ModelCard
from httpd.tools import ToolUse

# Their markers of calls are special tokens.
_SPECIAL_MARKERS = (ToolsFormat.LLAMA3, ToolsFormat.MISTRAL)


@dataclass(frozen=True, slots=True)
class Conversation:
    """Checked messages and tools, and what the answer must be."""

    messages: tuple[dict[str, Any], ...]
    tools: ToolUse = ToolUse()
    answer: Constraint | None = None  # None: any text
    continue_final: bool = False
    template_kwargs: dict[str, Any] = field(default_factory=dict)

    def prompt(self) -> ChatPrompt:
        """The prompt, with the tools where the template finds them."""
        kwargs = dict(self.template_kwargs)
        if self.tools.tools:
            kwargs["tools"] = list(self.tools.tools)
        return ChatPrompt(self.messages, kwargs, continue_final=self.continue_final)

    def constraint(self) -> Constraint | None:
        """The grammar of the answer. Raises `Rejected` where it would need two."""
        calls = self.tools.constraint()
        if self.answer is not None and calls is not None:
            raise invalid(
                f"Invalid '{self.answer.param}': 'tool_choice' already says that the answer is a "
                "call.",
                self.answer.param,
                "invalid_value",
            )
        return self.answer or calls


def check_name(card: ModelCard, model: str | None) -> None:
    """Raises `Rejected` (404) where `model` is given and is not `card`."""
    if model is not None and model != card.id:
        raise unknown_model(model)


def check_model(card: ModelCard, messages: list[Any], param: str) -> None:
    """Raises `Rejected` where `card` is no chat model, or has no room for `messages`.

    param  what the client calls its messages
    """
    if not card.has_chat_template:
        raise unsupported(param, "This model has no chat template; use /v1/completions instead.")
    if len(messages) > card.max_model_len:  # each takes a token at least
        raise invalid(
            f"This model's maximum context length is {card.max_model_len} tokens; the request has "
            f"{len(messages)} messages.",
            param,
            "context_length_exceeded",
        )


def call_of(
    fields: Fields,
    conversation: Conversation,
    card: ModelCard,
    telling: Telling,
    *,
    n: int = 1,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    thinking_budget: int | None = None,
    unknown_fields: tuple[str, ...],
) -> Call:
    """The call; `telling` becomes that of the conversation's tools. Raises `Rejected`."""
    tools = conversation.tools
    reads_calls = bool(tools.names) and card.formats.tools in _SPECIAL_MARKERS
    params = replace(
        sampling(fields, card, default_tokens=card.max_model_len),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        reasoning=reasoning_markers(card.formats),
        thinking_budget=thinking_budget,
        skip_special_tokens=fields.skip_special_tokens and not reads_calls,
    )
    telling = replace(
        telling,
        new_parser=partial(
            parser_for, card.formats, tool_names=tools.names, only_calls=tools.must_call
        ),
        named_call=tools.is_named,
        parallel_calls=tools.parallel,
    )
    return Call.of(
        fields,
        (conversation.prompt(),),
        params,
        telling,
        n=n,
        constraint=conversation.constraint(),
        unknown_fields=unknown_fields,
    )
