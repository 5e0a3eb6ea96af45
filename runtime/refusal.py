"""A refusal below the app, told as the app tells one: with an OpenAI error body."""

from httpd.errors import error_body
from httpd.service import Rejected
from httpd.text import json_bytes

Headers = list[tuple[bytes, bytes]]


def headers_and_body(refused: Rejected) -> tuple[Headers, bytes]:
    """What says so on the wire, whatever the protocol."""
    content = json_bytes(error_body(refused))
    length = b"%d" % len(content)
    return [(b"content-type", b"application/json"), (b"content-length", length)], content
