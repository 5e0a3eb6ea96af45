"""/v1/completions: its body and the shape of its answer."""

import json
from typing import Any

from engine.request import Prompt, TextPrompt, TokenPrompt
from httpd.answer import End, Identity
from httpd.call import Call
from httpd.errors import invalid, unknown_model, unsupported, wrong_type
from httpd.fields import CompletionFields, read_fields, unknown_fields
from httpd.service import ModelCard, Rejected
from httpd.strict_json import parse_object
from httpd.text import json_string, json_text, shown, well_formed

ID_PREFIX = "cmpl-"
DEFAULT_MAX_TOKENS = 16  # the OpenAI API's own

_PROMPT_FORMS = "a string, an array of token ids, or an array with one of these"


def parse_completion(body: bytes, card: ModelCard) -> Call:
    """The checked call. Pure, so that a large body can be read on another thread.

    Raises `Rejected`: 400, or 404 for another model.
    """
    raw = parse_object(body)
    fields = read_fields(CompletionFields, raw)
    if fields.model != card.id:
        raise unknown_model(fields.model)
    prompt = _prompt(fields.prompt, card.vocab_size)
    unknown = unknown_fields(CompletionFields, raw)
    default = DEFAULT_MAX_TOKENS
    return Call.of(fields, prompt, card, default_tokens=default, unknown_fields=unknown)


def _prompt(prompt: Any, vocab_size: int) -> Prompt:
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
        if len(prompt) > 1:
            raise unsupported(
                "prompt",
                f"Unsupported 'prompt': an array of {len(prompt)} prompts; send one per request.",
            )
        prompt = prompt[0]
    if isinstance(prompt, str) and prompt:
        return TextPrompt(prompt)
    if isinstance(prompt, list) and prompt:
        return TokenPrompt(_token_ids(prompt, vocab_size))
    if prompt in ("", []):
        raise invalid("Invalid 'prompt': it is empty.", "prompt", "empty_prompt")
    raise wrong_type("prompt", _PROMPT_FORMS, prompt)


def _token_ids(ids: list[Any], vocab_size: int) -> tuple[int, ...]:
    # Two passes without a Python-level loop body: prompts of a million ids are legal JSON.
    if set(map(type, ids)) != {int}:
        index = next(i for i, token_id in enumerate(ids) if type(token_id) is not int)
        raise wrong_type(f"prompt[{index}]", "a token id (an integer)", ids[index])
    if min(ids) < 0 or max(ids) >= vocab_size:
        raise _out_of_vocabulary(ids, vocab_size)
    return tuple(ids)


def _out_of_vocabulary(ids: list[int], vocab_size: int) -> Rejected:
    index = next(i for i, token_id in enumerate(ids) if not 0 <= token_id < vocab_size)
    return invalid(
        f"Invalid 'prompt[{index}]': token id {shown(ids[index])} is not in the vocabulary of "
        f"{vocab_size} tokens.",
        f"prompt[{index}]",
        "invalid_token_id",
    )


class CompletionShape:
    """Completion objects; `text_completion` when streaming too. Immutable."""

    def __init__(self, identity: Identity) -> None:
        head = identity.head("text_completion")
        self._head = json.loads(head + "}")
        self._empty = f'data: {head},"choices":[]'
        self._choice = f'data: {head},"choices":[{{"index":0,"text":'

    def opening(self, usage: str) -> str:
        """Nothing: there is no role to tell."""
        return ""

    def text(self, text: str, usage: str) -> str:
        """One piece of text."""
        text = json_string(text)
        return f'{self._choice}{text},"logprobs":null,"finish_reason":null}}]{usage}}}\n\n'

    def closing(self, end: End, usage: str) -> str:
        """No text, and the finish reason."""
        fields = json_text(end.fields())[1:]
        return f'{self._choice}"","logprobs":null,{fields}]{usage}}}\n\n'

    def last_usage(self, usage: str) -> str:
        """Usage without a choice."""
        return f"{self._empty}{usage}}}\n\n"

    def whole(self, text: str, end: End, usage: dict[str, Any]) -> dict[str, Any]:
        """A text_completion object."""
        choice = {"index": 0, "text": well_formed(text), "logprobs": None, **end.fields()}
        return {**self._head, "choices": [choice], "usage": usage}
