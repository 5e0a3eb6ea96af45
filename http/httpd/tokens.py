"""What a prompt costs, and what ids say: the routes that ask the tokenizer and no more.

POST /tokenize and /detokenize are in vLLM's shapes, /v1/messages/count_tokens in Anthropic's.
"""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Annotated, Any, Final, TypeVar

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from engine.request import ChatPrompt, Prompt, TextPrompt
from httpd.anthropic import parse_count
from httpd.body import parsed, read_body
from httpd.chat import read_conversation
from httpd.completions import read_token_ids
from httpd.conversation import check_model, check_name
from httpd.errors import MESSAGES_PATH, invalid
from httpd.fields import Body, ChatFields, read_fields
from httpd.json_answer import json_answer
from httpd.service import ModelCard, Service
from httpd.settings import HttpSettings
from httpd.status import ready_model
from httpd.strict_json import parse_object
from httpd.text import well_formed

MAX_IDS: Final = 1 << 20  # to decode at once: a second or two, and megabytes of text

Asked = TypeVar("Asked")


class TokenizeFields(Body):
    """A body of /tokenize; one with messages is a chat's besides."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None
    add_special_tokens: bool | None = None  # to a prompt, unless false; a template brings its own
    return_token_strs: bool = False


class DetokenizeFields(Body):
    """A body of /detokenize."""

    model: str | None = None
    tokens: Annotated[list[Any], Field(max_length=MAX_IDS)]


def token_routes(service: Service, settings: HttpSettings) -> list[Route]:
    """The routes over `service`."""

    async def tokenize(asked: tuple[Prompt, bool]) -> dict[str, Any]:
        prompt, wants_texts = asked
        ids = await service.tokenize(prompt)
        texts = await service.token_texts(ids) if wants_texts else None
        return {
            "count": len(ids),
            "max_model_len": service.model().max_model_len,
            "tokens": ids,
            "token_strs": texts,
        }

    async def detokenize(ids: tuple[int, ...]) -> dict[str, Any]:
        return {"prompt": well_formed(await service.detokenize(ids) if ids else "")}

    async def count(prompt: Prompt) -> dict[str, Any]:
        return {"input_tokens": len(await service.tokenize(prompt))}

    return [
        _json_route(f"{MESSAGES_PATH}/count_tokens", parse_count, count, service, settings),
        _json_route("/tokenize", parse_tokenize, tokenize, service, settings),
        _json_route("/detokenize", parse_detokenize, detokenize, service, settings),
    ]


def _json_route(
    path: str,
    parse: Callable[[bytes, ModelCard], Asked],
    answer: Callable[[Asked], Awaitable[dict[str, Any]]],
    service: Service,
    settings: HttpSettings,
) -> Route:
    """A POST route from one JSON object to another."""

    async def handle(request: Request) -> Response:
        body = await read_body(request.receive, settings.body_timeout_s)
        if body is None:
            return Response()  # to nobody
        asked = await parsed(parse, body, ready_model(service))
        return json_answer(await answer(asked))

    return Route(path, handle, methods=["POST"])


def parse_tokenize(body: bytes, card: ModelCard) -> tuple[Prompt, bool]:
    """The prompt, and whether the tokens' texts are wanted. Raises `Rejected`."""
    raw = parse_object(body)
    fields = read_fields(TokenizeFields, raw)
    if (fields.prompt is None) == (fields.messages is None):
        raise invalid("Give either 'prompt' or 'messages'.", "prompt", "missing_required_parameter")
    check_name(card, fields.model)
    if fields.messages is not None:
        return _chat_prompt(raw, card), fields.return_token_strs
    if not fields.prompt:
        raise invalid("Invalid 'prompt': it is empty.", "prompt", "empty_prompt")
    prompt = TextPrompt(fields.prompt, add_special_tokens=fields.add_special_tokens is not False)
    return prompt, fields.return_token_strs


def _chat_prompt(raw: dict[str, Any], card: ModelCard) -> ChatPrompt:
    fields = read_fields(ChatFields, {**raw, "model": card.id})
    check_model(card, fields.messages, "messages")
    prompt = read_conversation(fields).prompt()
    return replace(prompt, opens_answer=fields.add_generation_prompt)


def parse_detokenize(body: bytes, card: ModelCard) -> tuple[int, ...]:
    """The ids. Raises `Rejected`."""
    fields = read_fields(DetokenizeFields, parse_object(body))
    check_name(card, fields.model)
    return read_token_ids(fields.tokens, "tokens", card.vocab_size) if fields.tokens else ()
