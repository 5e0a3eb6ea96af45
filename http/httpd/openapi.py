"""GET /openapi.json: what is served, as an OpenAPI 3.1 document.

Bodies come from the pydantic models that check them, so their limits cannot differ. What those
models leave to other code (messages, items, tools) and the answers are in openapi_schemas.py.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from httpd.anthropic import MessageFields
from httpd.errors import MESSAGES_PATH
from httpd.fields import Body, ChatFields, CompletionFields, field_name
from httpd.openapi_insight import INSIGHT
from httpd.openapi_schemas import ANSWERS, FORMS, PARTS, PLACES, Schema, or_null, ref
from httpd.responses import ResponseFields
from httpd.service import Service, State
from httpd.text import json_bytes
from httpd.tokens import DetokenizeFields, TokenizeFields

PATH: Final = "/openapi.json"


@dataclass(frozen=True, slots=True)
class Operation:
    """What one route takes and gives."""

    summary: str
    answer: str  # name of a schema
    body: str | None = None  # likewise
    streams: bool = False
    not_found: bool = False  # 404 is for what the request names, not for its path
    media_type: str = "application/json"


# Name of a body's schema -> the model that checks it
BODIES: Final[Mapping[str, type[Body]]] = {
    "ChatCompletionRequest": ChatFields,
    "CompletionRequest": CompletionFields,
    "ResponseRequest": ResponseFields,
    "MessageRequest": MessageFields,
    "TokenizeRequest": TokenizeFields,
    "DetokenizeRequest": DetokenizeFields,
}

# (method, path) -> what it does
OPERATIONS: Final[Mapping[tuple[str, str], Operation]] = {
    ("POST", "/v1/chat/completions"): Operation(
        "A chat's next message", "ChatCompletion", "ChatCompletionRequest", True, True
    ),
    ("POST", "/v1/completions"): Operation(
        "What follows a text", "Completion", "CompletionRequest", True, True
    ),
    ("POST", "/v1/responses"): Operation(
        "A response, in OpenAI's newer API; without a memory of earlier ones",
        "Response", "ResponseRequest", True, True,
    ),
    ("POST", MESSAGES_PATH): Operation(
        "A chat's next message, in Anthropic's API", "Message", "MessageRequest", True, True
    ),
    ("POST", f"{MESSAGES_PATH}/count_tokens"): Operation(
        "How many tokens a prompt has", "TokenCount", "CountRequest", not_found=True
    ),
    ("POST", "/tokenize"): Operation(
        "The token ids of a prompt or a chat", "Tokens", "TokenizeRequest", not_found=True
    ),
    ("POST", "/detokenize"): Operation(
        "The text of token ids", "Text", "DetokenizeRequest", not_found=True
    ),
    ("GET", "/v1/models"): Operation("The served model", "ModelList"),
    ("GET", "/v1/models/{id:path}"): Operation("One model", "Model", not_found=True),
    ("GET", "/health"): Operation("Whether the server runs, and what requests hold", "Health"),
    ("GET", "/ready"): Operation("Whether the API answers", "Ready"),
    ("GET", "/version"): Operation("The server's version", "Version"),
    ("GET", "/server_info"): Operation("What is served, for a router of replicas", "ServerInfo"),
    ("GET", PATH): Operation("This document", "Object"),
    ("GET", "/capacity"): Operation("What the machine and the model can carry", "Capacity"),
    ("GET", "/live"): Operation("What the server does now", "Live"),
    ("GET", "/metrics"): Operation(
        "All metrics, for Prometheus", "PrometheusText", media_type="text/plain"
    ),
    ("GET", "/debug/requests/{id:path}"): Operation(
        "One request's way through the server", "Timeline", not_found=True
    ),
    ("GET", "/debug/steps"): Operation(
        "The engine's last steps and why they were so, a line of JSON each; for an admin",
        "StepLines", media_type="application/jsonl", not_found=True,
    ),
    ("GET", "/cache"): Operation("The prefix cache, as it can be drawn", "CacheOutline"),
    ("POST", "/flush_cache"): Operation(
        "Gives the prefix cache's pages back; for an admin", "Flushed"
    ),
    ("POST", "/debug/stacks"): Operation(
        "Where every thread is; for an admin", "StackDump", media_type="text/plain"
    ),
    ("POST", "/abort"): Operation(
        "Ends one request, or all; for an admin", "Aborted", "AbortRequest", not_found=True
    ),
}  # fmt: skip


class OpenApi:
    """The document of one app. Owned by its HTTP loop."""

    def __init__(self, service: Service, version: str) -> None:
        self._service = service
        self._version = version
        self._routes: list[Route] = []
        self._bodies: dict[str | None, bytes] = {}  # by the model's name, None before there is one

    def route(self) -> Route:
        """The route that tells the document."""
        return Route(PATH, self._answer, methods=["GET"])

    def describe(self, routes: Iterable[Route]) -> None:
        """Says which routes there are; once, before the first request."""
        self._routes = list(routes)

    async def _answer(self, _request: Request) -> Response:
        is_ready = self._service.state() is State.READY
        model = self._service.model().id if is_ready else None
        if model not in self._bodies:
            self._bodies[model] = json_bytes(document(self._routes, self._version, model))
        return Response(self._bodies[model], media_type="application/json")


def document(routes: Iterable[Route], version: str, model: str | None) -> dict[str, Any]:
    """The document.

    model  the name that a body's `model` must have; None: not known yet
    """
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        for method in sorted((route.methods or set()) - {"HEAD"}):
            path = route.path.replace(":path}", "}")
            operation = OPERATIONS[method, route.path]
            paths.setdefault(path, {})[method.lower()] = _operation(path, operation, model)
    insight = INSIGHT if "/live" in paths else {}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Plait",
            "version": version,
            "description": "A null is a field left out. Unknown fields are ignored.",
        },
        "paths": paths,
        "components": {
            "schemas": {**ANSWERS, **insight, **PARTS, **_body_schemas(model)},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


def _operation(path: str, operation: Operation, model: str | None) -> dict[str, Any]:
    error = "AnthropicError" if path.startswith(MESSAGES_PATH) else "Error"
    content: Schema = {operation.media_type: {"schema": ref(operation.answer)}}
    if operation.streams:
        content["text/event-stream"] = {}  # OpenAPI 3.1 has no word for one event's schema
    refused = {"content": {"application/json": {"schema": ref(error)}}}
    answers = {"401": "No key, or a wrong one", "503": "Not now; Retry-After says when"}
    if operation.body is not None:
        answers |= {"400": "What is wrong with the request", "413": "The body is too large"}
    if operation.not_found:
        answers["404"] = "What is named is not there"
    told: dict[str, Any] = {
        "summary": operation.summary,
        "responses": {
            "200": {"description": "Done", "content": content},
            **{code: {"description": why, **refused} for code, why in sorted(answers.items())},
            "default": {"description": "Any other error", **refused},
        },
    }
    if path == "/health":  # of a server that failed
        told["responses"]["503"] = {"description": "It ends", "content": content}
    if operation.body is not None:
        body = {"application/json": {"schema": ref(operation.body)}}
        told["requestBody"] = {"required": True, "content": body}
    if "{id}" in path:
        named = path.startswith("/v1/models/") and model
        schema = {"type": "string", "minLength": 1} | ({"examples": [model]} if named else {})
        told["parameters"] = [{"name": "id", "in": "path", "required": True, "schema": schema}]
    return told


def _body_schemas(model: str | None) -> dict[str, Schema]:
    schemas: dict[str, Schema] = {}
    for name, kind in BODIES.items():
        schemas[name] = _body_schema(kind, model, schemas)
    count = dict(schemas["MessageRequest"])
    count["required"] = [name for name in count["required"] if name != "max_tokens"]
    count["properties"] = {**count["properties"], "max_tokens": {}}
    return {**schemas, "CountRequest": count}


def _body_schema(kind: type[Body], model: str | None, schemas: dict[str, Schema]) -> Schema:
    """The schema of a body; what it refers to goes to `schemas`."""
    schema: Schema = _plain(kind.model_json_schema(ref_template="#/components/schemas/{model}"))
    for name, inner in schema.pop("$defs", {}).items():
        schemas[name] = inner
    properties, required = schema["properties"], schema.get("required", [])
    for name in properties:
        if name in PLACES.get(kind.__name__, {}):
            properties[name] = PLACES[kind.__name__][name]
        if name not in required:
            properties[name] = or_null(properties[name])
    if model is not None:
        named = {"type": "string", "enum": [model]}
        properties["model"] = named if "model" in required else or_null(named)
    known = {field_name(name, field) for name, field in kind.model_fields.items()}
    for name, values in kind.neutral.items():
        if name not in known:
            properties[name] = {"enum": [*values, None]}
    for name in sorted(kind.ignored - known):
        properties[name] = {"description": "Accepted, and without effect."}
    return schema | FORMS.get(kind.__name__, {})


def _plain(schema: Any) -> Any:
    """The schema without the models' own names and docstrings, which are for readers of the code,
    and without defaults."""
    if isinstance(schema, list):
        return [_plain(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: {key: _plain(value) for key, value in inner.items()}
        if name in ("properties", "$defs")
        else _plain(inner)
        for name, inner in schema.items()
        if name not in ("title", "description", "default")
    }
