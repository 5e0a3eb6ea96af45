"""What a request's head may be: how long its URL, how many headers, how its body is written.

The server below bounds the bytes of all headers together; this is for what fits into those. Bodies
are not decompressed: a few kilobytes could become any number of gigabytes. One whose length is told
in both ways is refused, since a proxy may have read the other: what one takes for a body's end the
other takes for the next request (RFC 9112, 6.1, which also has the connection closed).
"""

from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from httpd.errors import error_response
from httpd.service import Rejected
from httpd.text import shown

MAX_URL_BYTES: Final = 8 << 10  # RFC 9110, 4.1: at least 8,000
MAX_HEADERS: Final = 128  # Apache takes 100; a browser sends about 20

_TWO_LENGTHS: Final = "two_body_lengths"


class HeadLimits:
    """ASGI middleware that refuses what no client needs. Owned by its HTTP loop."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refused = _refusal(scope) if scope["type"] == "http" else None
        if refused is None:
            await self.app(scope, receive, send)
            return
        response = error_response(refused, scope["path"])
        if refused.status == 415:
            response.headers["accept-encoding"] = "identity"  # RFC 9110, 15.5.16: what may be sent
        if refused.code == _TWO_LENGTHS:
            response.headers["connection"] = "close"
        await response(scope, receive, send)


def _refusal(scope: Scope) -> Rejected | None:
    url_bytes = len(scope["raw_path"]) + len(scope["query_string"])
    if url_bytes > MAX_URL_BYTES:
        message = f"The URL has {url_bytes} bytes; the limit is {MAX_URL_BYTES}."
        return Rejected(414, message, code="url_too_long")
    headers = len(scope["headers"])
    if headers > MAX_HEADERS:
        message = f"The request has {headers} headers; the limit is {MAX_HEADERS}."
        return Rejected(431, message, code="headers_too_large")
    names = {name for name, _ in scope["headers"]}
    if names >= {b"content-length", b"transfer-encoding"}:
        message = "The request has both a Content-Length and a Transfer-Encoding; send one."
        return Rejected(400, message, code=_TWO_LENGTHS)
    for name, value in scope["headers"]:
        if name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
            message = (
                f"The body's Content-Encoding is {shown(value.decode('latin-1'))}; send it plain."
            )
            return Rejected(415, message, code="unsupported_content_encoding")
    return None
