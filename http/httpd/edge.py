"""The outermost layer: an x-request-id on every response, a trace of every request, and a JSON body
for our own faults."""

import logging
import re
import secrets

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from httpd.errors import error_response, internal_error
from httpd.traces import Trace, Traces

log = logging.getLogger(__name__)

_MOST_TRACEPARENT = 128  # it has 55 characters; later versions of it may have more
_SANE_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


class Edge:
    """ASGI middleware around everything else. Owned by its HTTP loop."""

    def __init__(self, app: ASGIApp, traces: Traces) -> None:
        self.app, self._traces = app, traces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers = Headers(scope=scope)
        request_id = _request_id(headers.get("x-request-id", ""))
        # Whoever makes spans of it reads it, and takes none that is not as W3C says.
        traceparent = headers.get("traceparent", "")[:_MOST_TRACEPARENT]
        with self._traces.entry(request_id, scope["path"], traceparent) as trace:
            await self._answer(trace, scope, receive, send)

    async def _answer(self, trace: Trace, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = trace.request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                trace.status = message["status"]
                message = {**message, "headers": list(message.get("headers", []))}
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        except Exception:
            log.exception("request %s failed", request_id)
            if trace.status is not None:
                raise  # only closing the connection can still tell the client
            response = error_response(internal_error(), scope["path"])
            await response(scope, receive, send_with_id)


def _request_id(wanted: str) -> str:
    """The client's own where it is harmless; it names nothing inside the server."""
    return wanted if _SANE_ID.fullmatch(wanted) else f"req_{secrets.token_hex(12)}"
