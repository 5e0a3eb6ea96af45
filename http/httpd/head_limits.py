"""What a request's head may be: how long its URL, how many headers.

The server below bounds the bytes of all headers together; this is for what fits into those.
"""

from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from httpd.errors import error_response
from httpd.service import Rejected

MAX_URL_BYTES: Final = 8 << 10  # RFC 9110, 4.1: at least 8,000
MAX_HEADERS: Final = 128  # Apache takes 100; a browser sends about 20


class HeadLimits:
    """ASGI middleware that refuses what no client needs. Owned by its HTTP loop."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refused = _refusal(scope) if scope["type"] == "http" else None
        if refused is None:
            await self.app(scope, receive, send)
        else:
            await error_response(refused, scope["path"])(scope, receive, send)


def _refusal(scope: Scope) -> Rejected | None:
    url_bytes = len(scope["raw_path"]) + len(scope["query_string"])
    if url_bytes > MAX_URL_BYTES:
        message = f"The URL has {url_bytes} bytes; the limit is {MAX_URL_BYTES}."
        return Rejected(414, message, code="url_too_long")
    headers = len(scope["headers"])
    if headers > MAX_HEADERS:
        message = f"The request has {headers} headers; the limit is {MAX_HEADERS}."
        return Rejected(431, message, code="headers_too_large")
    return None
