"""The routes that read and never generate: /health, /ready, /version, /server_info, /v1/models."""

import dataclasses
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from httpd.errors import not_ready, unknown_model
from httpd.json_answer import json_answer
from httpd.service import ModelCard, Service, State


def status_routes(service: Service, version: str) -> list[Route]:
    """The routes over `service`."""

    async def health(_request: Request) -> Response:
        """Answers from the start; 503 only where a restart is what helps."""
        state = service.state()
        occupancy = service.occupancy()
        told = {
            "state": state.value,
            "gil_enabled": service.gil_enabled(),
            "version": version,
            "occupancy": None if occupancy is None else dataclasses.asdict(occupancy),
        }
        return json_answer(told, 503 if state is State.FAILED else 200)

    async def ready(_request: Request) -> Response:
        ready_model(service)
        return json_answer({"state": State.READY.value})

    async def version_of(_request: Request) -> Response:
        return json_answer({"version": version})

    async def server_info(_request: Request) -> Response:
        """SGLang's name for it: its router asks every replica what it serves, once."""
        card = ready_model(service)
        told = {"served_model_name": card.id, "max_model_len": card.max_model_len}
        return json_answer({**told, "version": version})

    async def models(_request: Request) -> Response:
        return json_answer({"object": "list", "data": [_model_object(ready_model(service))]})

    async def model(request: Request) -> Response:
        card = ready_model(service)
        if request.path_params["id"] != card.id:
            raise unknown_model(request.path_params["id"])
        return json_answer(_model_object(card))

    return [
        Route("/health", health, methods=["GET"]),
        Route("/ready", ready, methods=["GET"]),
        Route("/version", version_of, methods=["GET"]),
        Route("/server_info", server_info, methods=["GET"]),
        Route("/v1/models", models, methods=["GET"]),
        Route("/v1/models/{id:path}", model, methods=["GET"]),
    ]


def ready_model(service: Service) -> ModelCard:
    """The served model. Raises `Rejected` (503) outside of READY."""
    state = service.state()
    if state is not State.READY:
        raise not_ready(state)
    return service.model()


def _model_object(card: ModelCard) -> dict[str, Any]:
    return {
        "id": card.id,
        "object": "model",
        "created": card.created,
        "owned_by": "plait",
        "root": card.id,
        "max_model_len": card.max_model_len,
    }
