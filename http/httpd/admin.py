"""The operator's routes.

POST /flush_cache; POST /abort for one request or for all; GET /debug/steps, why the last steps of
the engine were as they were; POST /debug/stacks, where every thread is now. GET /cache is not for
an admin alone: like /live, it tells sizes of what others asked, and no text.
"""

from typing import Any, Final, Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, request_response

from httpd.auth import Access, AdminOnly
from httpd.body import read_body
from httpd.errors import invalid, wrong_type
from httpd.json_answer import json_answer
from httpd.running import Running
from httpd.service import Rejected
from httpd.strict_json import parse_object
from httpd.text import shown

STEPS: Final = 100  # told of where the request does not say how many


class Control(Protocol):
    """What an admin may do with the server. Every method is called on the HTTP loop."""

    @property
    def running(self) -> Running:
        """Where this loop's responses are listed while they are made."""
        ...

    async def flush_cache(self) -> int:
        """The pages that the prefix cache gave back: all that no request reads.

        Raises `Rejected` (503) where the engine does not run, or ends meanwhile.
        """
        ...

    async def read_steps(self, count: int) -> bytes:
        """The last steps, oldest first, a line of JSON each.

        Raises `Rejected` as `flush_cache` does; 404 where none are kept.
        """
        ...

    async def outline_cache(self) -> dict[str, Any]:
        """The prefix cache as it can be drawn, as the schema `CacheOutline` says.

        Raises `Rejected` as `flush_cache` does.
        """
        ...

    async def abort(self, response_id: str | None) -> int:
        """Ends the response of this id, or every request; how many there were.

        Their clients are told. Raises `Rejected` (503) as `flush_cache` does.
        """
        ...

    def stacks(self) -> str:
        """The Python stack of every thread."""
        ...


def admin_routes(control: Control, access: Access, body_timeout_s: float) -> list[Route]:
    """The routes over `control`."""

    async def flush_cache(_request: Request) -> Response:
        return json_answer({"freed_pages": await control.flush_cache()})

    async def abort(request: Request) -> Response:
        body = await read_body(request.receive, body_timeout_s)
        if body is None:
            return Response()  # to nobody
        response_id = _which(parse_object(body))
        aborted = await control.abort(response_id)
        if response_id is not None and not aborted:
            message = f"No response {shown(response_id)} is being made."
            raise Rejected(404, message, param="id", code="response_not_found")
        return json_answer({"aborted": aborted})

    async def read_steps(request: Request) -> Response:
        lines = await control.read_steps(_how_many(request.query_params.get("last")))
        return Response(lines, media_type="application/jsonl")

    async def stacks(_request: Request) -> Response:
        return Response(control.stacks(), media_type="text/plain")

    async def cache(_request: Request) -> Response:
        return json_answer(await control.outline_cache())

    acts = (
        ("/flush_cache", flush_cache), ("/abort", abort), ("/debug/steps", read_steps),
        ("/debug/stacks", stacks),
    )  # fmt: skip
    return [
        Route("/cache", cache, methods=["GET"]),
        *(
            Route(
                path,
                AdminOnly(request_response(act), access),
                methods=["GET" if act is read_steps else "POST"],
            )
            for path, act in acts
        ),
    ]


def _how_many(last: str | None) -> int:
    """Steps asked for. Raises `Rejected` (400)."""
    if last is None:
        return STEPS
    if not (last.isascii() and last.isdecimal() and len(last) <= 9 and 1 <= int(last)):
        message = f"'last' is {shown(last)}; it must be a whole number, 1 or more."
        raise invalid(message, "last", "invalid_value")
    return int(last)


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
