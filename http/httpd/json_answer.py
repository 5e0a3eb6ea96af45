"""A whole answer that is one JSON object."""

from typing import Any

from starlette.responses import Response

from httpd.text import json_bytes


def json_answer(value: dict[str, Any], status: int = 200) -> Response:
    """The response that says `value`."""
    return Response(json_bytes(value), status, media_type="application/json")
