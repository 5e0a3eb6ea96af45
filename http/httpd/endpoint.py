"""The way of one request from its body to the end of its answer; the same for chat and completions.

Guarantees: whatever happens after `submit` returns (an error, a disconnect, the server's end), the
generation is aborted or finished when the endpoint returns.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engine.request import Delta
from httpd.answer import Choice, Identity, Usage
from httpd.body import read_body
from httpd.call import Call, Telling
from httpd.disconnect import until_disconnect
from httpd.errors import error_body, internal_error, not_ready
from httpd.events import DONE, EventStream
from httpd.merged import merged
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
    object: str
    chunk_object: str
    parse: Callable[[bytes, ModelCard], Call]
    choice: Callable[[int, Telling], Choice]


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
        generations = await self._submit(call)
        telling, per_prompt = call.telling, len(call.params)
        del call  # its prompts are the tokenizers' now, and may be megabytes
        try:
            identity = Identity.fresh(self._api.id_prefix, card, self._settings.version)
            answer = _Answer(self._api, identity, generations, per_prompt, telling)
            if telling.stream:
                await self._stream(answer, send)
            else:
                response = Response(json_bytes(await answer.whole()), media_type="application/json")
                await response(scope, receive, send)
        finally:
            for generation in generations:
                generation.abort()

    async def _submit(self, call: Call) -> list[Generation]:
        """A generation for each choice, in order. Raises `Rejected`; then none is left."""
        asked = [
            asyncio.ensure_future(
                self._service.submit(
                    prompt, call.params, max_tokens_given=call.max_tokens_given,
                    constraint=call.constraint, namespace=call.namespace,
                )
            )
            for prompt in call.prompts
        ]  # fmt: skip
        try:
            return [each for generations in await asyncio.gather(*asked) for each in generations]
        except BaseException:
            for one in asked:
                one.cancel()
            for done in await asyncio.gather(*asked, return_exceptions=True):
                for generation in done if isinstance(done, Sequence) else ():
                    generation.abort()
            raise

    async def _parse(self, body: bytes, card: ModelCard) -> Call:
        if len(body) <= INLINE_PARSE_BYTES:
            return self._api.parse(body, card)
        return await asyncio.to_thread(self._api.parse, body, card)

    async def _stream(self, answer: "_Answer", send: Send) -> None:
        async with EventStream(send, self._settings.ping_interval_s) as events:
            try:
                async for some in answer.events():
                    await events.write(some)
                last = answer.ending()
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


class _Answer:
    """The choices of one response while they grow. Owned by the HTTP loop."""

    def __init__(
        self,
        api: Api,
        identity: Identity,
        generations: Sequence[Generation],
        per_prompt: int,
        telling: Telling,
    ) -> None:
        self._api, self._identity, self._telling = api, identity, telling
        self._generations = generations
        self._choices = [api.choice(index, telling) for index in range(len(generations))]
        self._usage = Usage(generations, per_prompt)
        self._head = f'data: {identity.head(api.chunk_object)},"choices":['
        self._last = ""  # of a stream: the events of the last delta

    async def whole(self) -> dict[str, object]:
        """The one object of an answer that is not streamed."""
        async for index, delta in self._deltas():
            self._choices[index].take(delta)
        return {
            **self._identity.fields(self._api.object),
            "choices": [choice.whole() for choice in self._choices],
            "usage": self._usage.object(),
        }

    async def events(self) -> AsyncIterator[str]:
        """The events of a stream but for `ending`; what comes at a time is one string."""
        opening = [each for choice in self._choices for each in choice.opening()]
        if opening:
            yield self._chunks(opening)
        async for index, delta in self._deltas():
            self._last = self._chunks(self._choices[index].chunks(delta))
            if self._last and any(not choice.is_over for choice in self._choices):
                some, self._last = self._last, ""
                yield some

    def ending(self) -> str:
        """The last events: they go in one write."""
        usage = ""
        if self._telling.include_usage:
            usage = f'{self._head}],"usage":{json_text(self._usage.object())}}}\n\n'
        return self._last + usage + DONE

    def _chunks(self, choices: list[str]) -> str:
        usage = self._chunk_usage()
        return "".join(f"{self._head}{choice}]{usage}}}\n\n" for choice in choices)

    async def _deltas(self) -> AsyncIterator[tuple[int, Delta]]:
        """What the generations bring, until each has ended or its choice is over."""
        async for index, delta in merged(self._generations):
            if self._choices[index].is_over:
                continue  # what came before the abort was heard of
            self._usage.take(index, delta)
            yield index, delta
            if self._choices[index].is_over:
                self._generations[index].abort()  # of a call too many; else it has ended
        if not all(choice.is_over for choice in self._choices):
            raise RuntimeError("a generation stopped without a finish")

    def _chunk_usage(self) -> str:
        """The usage key of a chunk that has choices."""
        if self._telling.continuous_usage:
            return f',"usage":{json_text(self._usage.object())}'
        return ',"usage":null' if self._telling.include_usage else ""


def _error_event(failure: Rejected) -> str:
    return f"data: {json_text(error_body(failure))}\n\n"
