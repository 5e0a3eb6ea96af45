"""The way of one request from its body to the end of its answer; the same for all that generate.

Guarantees: whatever happens after `submit` returns (an error, a disconnect, the server's end), the
generation is aborted or finished when the endpoint returns.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from httpd.answer import Answer, Begun, Identity
from httpd.auth import caller_of
from httpd.body import parsed, read_body
from httpd.call import Call, Telling
from httpd.deadline import on_late_stream
from httpd.disconnect import until_disconnect
from httpd.errors import internal_error, invalid, not_ready
from httpd.events import EventStream
from httpd.running import Running
from httpd.service import Generation, ModelCard, Rejected, Service, State
from httpd.settings import HttpSettings
from httpd.text import json_bytes
from httpd.traces import current_trace

log = logging.getLogger(__name__)

# Log-probabilities of prompts in one answer: 15 MB of JSON, and a second of the loop.
MAX_PROMPT_SCORES = 1 << 20

MAX_LOGGED_NAMES = 100  # unknown fields; more would be an attack on the log


@dataclass(frozen=True, slots=True)
class Api:
    """What tells one endpoint from the other."""

    id_prefix: str
    parse: Callable[[bytes, ModelCard], Call]
    answer: Callable[[Begun], Answer]
    # Params of the service's refusals that are called otherwise here.
    renamed: Mapping[str, str] = field(default_factory=dict)


class Endpoint:
    """An ASGI app for one POST route. Owned by its HTTP loop."""

    def __init__(
        self, api: Api, service: Service, settings: HttpSettings, running: Running
    ) -> None:
        self._api = api
        self._running = running
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
        call = await parsed(self._api.parse, body, card)
        del body
        self._check_size(call)
        call = call.within(caller_of(scope) if self._settings.isolates_keys else "")
        self._log_unknown(call.unknown_fields)
        generations = await self._submit(call)
        telling, per_prompt = call.telling, len(call.params)
        del call  # its prompts are the tokenizers' now, and may be megabytes
        try:
            identity = Identity.fresh(self._api.id_prefix, card, self._settings.version)
            trace = current_trace()
            if trace is not None:
                trace.response_id = identity.id
            answer = self._api.answer(Begun(identity, generations, per_prompt, telling))
            with self._running.entry(identity.id, lambda: _end(generations)):
                if telling.stream:
                    on_late_stream(scope, answer.failed)
                    return await self._stream(answer, send)
                whole = await _json(await answer.whole(), telling)
            await Response(whole, media_type="application/json")(scope, receive, send)
        finally:
            for generation in generations:
                generation.abort()

    def _check_size(self, call: Call) -> None:
        """Raises `Rejected` where a request asks for too many answers."""
        choices, limit = len(call.jobs) * len(call.params), self._settings.max_choices
        if choices > limit:
            raise invalid(
                f"Invalid 'n': {len(call.params)} for each of {len(call.jobs)} prompts are "
                f"{choices} choices; the limit is {limit}.",
                "n",
                "integer_above_max_value",
            )

    async def _submit(self, call: Call) -> list[Generation]:
        """A generation for each choice, in order. Raises `Rejected`; then none is left."""
        asked = [asyncio.ensure_future(self._service.submit(job)) for job in call.jobs]
        try:
            made = [each for generations in await asyncio.gather(*asked) for each in generations]
            _check_scores(call, made)
            return made
        except BaseException as error:
            if isinstance(error, Rejected) and error.param is not None:
                error.param = self._api.renamed.get(error.param, error.param)
            for one in asked:
                one.cancel()
            for done in await asyncio.gather(*asked, return_exceptions=True):
                for generation in done if isinstance(done, Sequence) else ():
                    generation.abort()
            raise

    async def _stream(self, answer: Answer, send: Send) -> None:
        async with EventStream(send, self._settings.ping_interval_s) as events:
            try:
                async for some in answer.events():
                    await events.write(some)
                last = answer.ending()
            except Rejected as failure:
                last = answer.failed(failure)
            except Exception:
                log.exception("a stream failed")
                last = answer.failed(internal_error())
            await events.write(last, more=False)

    def _log_unknown(self, names: tuple[str, ...]) -> None:
        for name in names:
            if len(self._logged_names) >= MAX_LOGGED_NAMES:
                return
            if name not in self._logged_names:
                self._logged_names.add(name)
                log.warning("requests name a field that is unknown and ignored: %s", name)


def _check_scores(call: Call, generations: Sequence[Generation]) -> None:
    """Raises `Rejected` where the prompts' log-probabilities would be too many."""
    top = call.params[0].prompt_logprobs
    if top is None:
        return
    tokens = sum(generation.prompt_tokens for generation in generations)
    if tokens * (1 + top) > MAX_PROMPT_SCORES:
        param = "logprobs" if call.telling.prompt_logprobs is None else "prompt_logprobs"
        raise invalid(
            f"Invalid '{param}': {top} beside each of {tokens} prompt tokens are "
            f"{tokens * (1 + top)} log-probabilities; the limit is {MAX_PROMPT_SCORES}. Send fewer "
            f"prompts at a time, or a lower 'n' or '{param}'.",
            param,
            "integer_above_max_value",
        )


def _end(generations: Sequence[Generation]) -> None:
    for generation in generations:
        generation.end()


async def _json(answer: dict[str, object], telling: Telling) -> bytes:
    """Megabytes of log-probabilities are written elsewhere: other clients' events go on."""
    is_large = telling.logprobs or telling.prompt_logprobs is not None
    return await asyncio.to_thread(json_bytes, answer) if is_large else json_bytes(answer)
