"""What an operator looks at: GET /capacity, /live, /metrics and /debug/requests/{id}.

They tell ids, sizes and times of other clients' requests, and never any text. Like all routes they
are behind the API keys, where there are some.
"""

from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from httpd.json_answer import json_answer
from httpd.service import Rejected
from httpd.text import shown

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"  # Prometheus' text format


class Insight(Protocol):
    """What the server knows of itself. Called on the HTTP loop; nothing blocks it."""

    async def capacity(self) -> dict[str, Any]:
        """What the machine and the model can carry, as the schema `Capacity` says."""
        ...

    def live(self) -> dict[str, Any]:
        """What the server does now, as the schema `Live` says."""
        ...

    async def metrics(self) -> bytes:
        """All metrics in Prometheus' text format."""
        ...

    def timeline(self, request_id: str) -> dict[str, Any] | None:
        """One request's way through the server, as the schema `Timeline` says.

        request_id  its x-request-id, or the id of its response

        None where it is not known, or no longer.
        """
        ...


def insight_routes(insight: Insight) -> list[Route]:
    """The routes over `insight`."""

    async def capacity(_request: Request) -> Response:
        return json_answer(await insight.capacity())

    async def live(_request: Request) -> Response:
        return json_answer(insight.live())

    async def metrics(_request: Request) -> Response:
        return Response(await insight.metrics(), media_type=METRICS_TYPE)

    async def timeline(request: Request) -> Response:
        request_id = request.path_params["id"]
        told = insight.timeline(request_id)
        if told is None:
            message = f"Nothing is known of a request {shown(request_id)}, or no longer."
            raise Rejected(404, message, param="id", code="request_not_found")
        return json_answer(told)

    return [
        Route("/capacity", capacity, methods=["GET"]),
        Route("/live", live, methods=["GET"]),
        Route("/metrics", metrics, methods=["GET"]),
        Route("/debug/requests/{id:path}", timeline, methods=["GET"]),
    ]
