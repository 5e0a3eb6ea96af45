"""The operator's routes: POST /flush_cache, and POST /abort for one request or for all."""

from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, request_response

from httpd.auth import Access, AdminOnly
from httpd.body import read_body
from httpd.errors import invalid, wrong_type
from httpd.running import Running
from httpd.service import Rejected
from httpd.strict_json import parse_object
from httpd.text import json_bytes, shown


class Control(Protocol):
    """What an admin may do with the server. Every method is called on the HTTP loop."""

    async def flush_cache(self) -> int:
        """The pages that the prefix cache gave back: all that no request reads.

        Raises `Rejected` (503) where the engine does not run, or ends meanwhile.
        """
        ...

    def abort_all(self) -> int:
        """Ends every request; how many there were. Their clients are told."""
        ...


def admin_routes(
    control: Control, running: Running, access: Access, body_timeout_s: float
) -> list[Route]:
    """The routes over `control`."""

    async def flush_cache(_request: Request) -> Response:
        return _json({"freed_pages": await control.flush_cache()})

    async def abort(request: Request) -> Response:
        body = await read_body(request.receive, body_timeout_s)
        if body is None:
            return Response()  # to nobody
        response_id = _which(parse_object(body))
        if response_id is None:
            return _json({"aborted": control.abort_all()})
        if not running.try_end(response_id):
            message = f"No response {shown(response_id)} is being made."
            raise Rejected(404, message, param="id", code="response_not_found")
        return _json({"aborted": 1})

    return [
        Route(f"/{act.__name__}", AdminOnly(request_response(act), access), methods=["POST"])
        for act in (flush_cache, abort)
    ]


def _which(asked: dict[str, Any]) -> str | None:
    """The response id to abort, None for all. Raises `Rejected` (400)."""
    response_id, everyone = asked.get("id"), asked.get("all")
    if response_id is not None and not isinstance(response_id, str):
        raise wrong_type("id", "a string", response_id)
    if everyone is not None and not isinstance(everyone, bool):
        raise wrong_type("all", "a boolean", everyone)
    if (response_id is None) == (not everyone):
        message = "Give either 'id', of a response that is being made, or 'all': true."
        raise invalid(message, "id", "missing_required_parameter")
    return response_id


def _json(value: dict[str, Any]) -> Response:
    return Response(json_bytes(value), media_type="application/json")
