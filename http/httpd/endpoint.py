"""The way of one request from its body to the end of its answer; the same for chat and completions.

Guarantees: whatever happens after `submit` returns (an error, a disconnect, the server's end), the
generation is aborted or finished when the endpoint returns.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engine.request import Delta
from httpd.answer import End, Identity, Shape, usage_object
from httpd.body import read_body
from httpd.call import Call, Telling
from httpd.disconnect import until_disconnect
from httpd.errors import error_body, internal_error, not_ready
from httpd.events import DONE, EventStream
from httpd.service import Generation, ModelCard, Rejected, Service, State
from httpd.settings import HttpSettings
from httpd.text import json_bytes, json_text

log = logging.getLogger(__name__)

# Larger bodies are parsed on a thread of their own: a megabyte of token ids takes 20 ms, in which
# the loop could have sent hundreds of events.
INLINE_PARSE_BYTES = 64 << 10

MAX_LOGGED_NAMES = 100  # unknown fields; more would be an attack on the log


@dataclass(frozen=True, slots=True)
class Api:
    """What tells one endpoint from the other."""

    id_prefix: str
    parse: Callable[[bytes, ModelCard], Call]
    shape: Callable[[Identity], Shape]


class Endpoint:
    """An ASGI app for one POST route. Owned by the HTTP loop."""

    def __init__(self, api: Api, service: Service, settings: HttpSettings) -> None:
        self._api = api
        self._service = service
        self._settings = settings
        self._logged_names: set[str] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await read_body(receive, self._settings.body_timeout_s)
        if body is not None:
            answering = self._answer(body, scope, receive, send)
            del body  # megabytes, perhaps, which would stay for as long as the answer takes
            await until_disconnect(receive, answering)

    async def _answer(self, body: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises `Rejected` only before the response has begun."""
        state = self._service.state()
        if state is not State.READY:
            raise not_ready(state)
        card = self._service.model()
        call = await self._parse(body, card)
        del body
        self._log_unknown(call.unknown_fields)
        generation = await self._service.submit(
            call.prompt, call.params, max_tokens_given=call.max_tokens_given
        )
        telling = call.telling
        del call  # its prompt is the tokenizer's now, and may be megabytes
        try:
            identity = Identity.fresh(self._api.id_prefix, card, self._settings.version)
            shape = self._api.shape(identity)
            if telling.stream:
                await self._stream(telling, generation, shape, send)
            else:
                response = await _whole(generation, shape)
                await response(scope, receive, send)
        finally:
            generation.abort()

    async def _parse(self, body: bytes, card: ModelCard) -> Call:
        if len(body) <= INLINE_PARSE_BYTES:
            return self._api.parse(body, card)
        return await asyncio.to_thread(self._api.parse, body, card)

    async def _stream(
        self, telling: Telling, generation: Generation, shape: Shape, send: Send
    ) -> None:
        async with EventStream(send, self._settings.ping_interval_s) as events:
            try:
                last = await _send_deltas(telling, generation, shape, events)
            except Rejected as failure:
                last = _error_event(failure)
            except Exception:
                log.exception("a stream failed")
                last = _error_event(internal_error())
            await events.write(last, more=False)

    def _log_unknown(self, names: tuple[str, ...]) -> None:
        for name in names:
            if len(self._logged_names) >= MAX_LOGGED_NAMES:
                return
            if name not in self._logged_names:
                self._logged_names.add(name)
                log.warning("requests name a field that is unknown and ignored: %s", name)


async def _whole(generation: Generation, shape: Shape) -> Response:
    parts: list[str] = []
    end = None
    async for delta in generation:
        parts.append(delta.text)
        end = End.of(delta)
    if end is None:
        raise RuntimeError("a generation stopped without a finish")
    answer = shape.whole("".join(parts), end, _usage(generation, delta))
    return Response(json_bytes(answer), media_type="application/json")


async def _send_deltas(
    telling: Telling, generation: Generation, shape: Shape, events: EventStream
) -> str:
    """Sends all but the last events, and returns those."""

    def usage(delta: Delta | None) -> str:
        """The usage key of a chunk that has choices."""
        if telling.continuous_usage:
            return f',"usage":{json_text(_usage(generation, delta))}'
        return ',"usage":null' if telling.include_usage else ""

    opening = shape.opening(usage(None))
    if opening:
        await events.write(opening)
    last = ""
    async for delta in generation:
        text = shape.text(delta.text, usage(delta)) if delta.text else ""
        end = End.of(delta)
        if end is not None:
            last = text + shape.closing(end, usage(delta))
        elif text:
            await events.write(text)
    if not last:
        raise RuntimeError("a generation stopped without a finish")
    if telling.include_usage:
        last += shape.last_usage(f',"usage":{json_text(_usage(generation, delta))}')
    return last + DONE


def _usage(generation: Generation, delta: Delta | None) -> dict[str, object]:
    completion_tokens = delta.completion_tokens if delta else 0
    cached_tokens = delta.cached_tokens if delta else 0
    return usage_object(generation.prompt_tokens, completion_tokens, cached_tokens)


def _error_event(failure: Rejected) -> str:
    return f"data: {json_text(error_body(failure))}\n\n"
