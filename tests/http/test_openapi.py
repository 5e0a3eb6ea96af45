"""The OpenAPI document: every route is in it, its references lead somewhere, its limits hold."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import jsonschema
import pytest
from starlette.routing import Route

from httpd.app import create_app
from httpd.auth import Access
from httpd.openapi import BODIES, OPERATIONS
from httpd.openapi_schemas import PLACES
from httpd.service import State
from tests.fakes_control import FakeControl
from tests.fakes_insight import KNOWN_REQUEST, FakeInsight
from tests.fakes_service import FakeService
from tests.http.conftest import SETTINGS

pytestmark = pytest.mark.anyio


async def document_of(client: httpx.AsyncClient) -> Any:
    response = await client.get("/openapi.json")
    assert response.status_code == 200
    return response.json()


def references(value: Any) -> Iterator[str]:
    if isinstance(value, list):
        value = dict(enumerate(value))
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for inner in value.values():
            yield from references(inner)


async def test_every_route_is_in_it() -> None:
    app = create_app(FakeService(), SETTINGS, FakeControl(), FakeInsight())
    routes = [route for route in app.routes if isinstance(route, Route)]
    assert len(routes) == len(app.routes)
    served = {
        (method, route.path) for route in routes for method in (route.methods or set()) - {"HEAD"}
    }
    assert served == {*OPERATIONS, ("GET", "/")}  # the page is for people, and for no client
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://plait") as client:
        paths = (await document_of(client))["paths"]
    told = {(method.upper(), path) for path in paths for method in paths[path]}
    assert told == {(method, path.replace(":path}", "}")) for method, path in OPERATIONS}


async def test_only_what_is_served_is_in_it(client: httpx.AsyncClient) -> None:
    assert "/abort" not in (await document_of(client))["paths"]


async def test_references_lead_somewhere(client: httpx.AsyncClient) -> None:
    document = await document_of(client)
    schemas = document["components"]["schemas"]
    for reference in references(document):
        assert reference.removeprefix("#/components/schemas/") in schemas, reference
    unused = set(schemas) - {each.rpartition("/")[2] for each in references(document)}
    of_admins = {
        "AbortRequest", "Aborted", "Flushed", "StepLines", "StackDump", "CacheOutline",
    }  # fmt: skip
    assert unused <= of_admins


async def test_the_limits_are_those_of_the_models(client: httpx.AsyncClient) -> None:
    schemas = (await document_of(client))["components"]["schemas"]
    chat = schemas["ChatCompletionRequest"]["properties"]
    assert chat["temperature"]["anyOf"] == [
        {"type": "number", "minimum": 0, "maximum": 2}, {"type": "null"},
    ]  # fmt: skip
    assert chat["best_of"] == {"enum": [1, None]}
    assert chat["model"] == {"type": "string", "enum": ["org/tiny-model"]}
    message = schemas["MessageRequest"]
    assert "stop_sequences" in message["properties"] and "stop" not in message["properties"]
    assert {"model", "messages", "max_tokens"} == set(message["required"])
    assert {"model", "messages"} == set(schemas["CountRequest"]["required"])
    assert not [name for name, schema in schemas.items() if "description" in schema]


async def test_before_the_model_is_known(client: httpx.AsyncClient, service: FakeService) -> None:
    service.current_state = State.LOADING
    chat = (await document_of(client))["components"]["schemas"]["ChatCompletionRequest"]
    assert chat["properties"]["model"] == {"type": "string"}


def test_places_are_fields() -> None:
    fields = {kind.__name__: kind.model_fields for kind in BODIES.values()}
    assert all(place in fields[kind] for kind, places in PLACES.items() for place in places)


JSON = "application/json"
MESSAGES = [{"role": "user", "content": "hi"}]
NAMED = {"model": "org/tiny-model"}
ASKED: list[tuple[str, Any]] = [
    ("/v1/chat/completions", {**NAMED, "messages": MESSAGES, "stop": "x", "best_of": 1}),
    ("/v1/completions", {**NAMED, "prompt": ["a", [1, 2]], "logprobs": 0}),
    ("/v1/responses", {**NAMED, "input": [{"role": "user", "content": "hi"}]}),
    ("/v1/messages", {**NAMED, "messages": MESSAGES, "max_tokens": 3, "system": None}),
    ("/v1/messages/count_tokens", {**NAMED, "messages": MESSAGES}),
    ("/tokenize", {"prompt": "hi", "return_token_strs": True}),
    ("/detokenize", {"tokens": [1, 2]}),
    ("/v1/models", None),
    ("/v1/models/{id}", None),
    ("/health", None),
    ("/ready", None),
    ("/version", None),
    ("/server_info", None),
    ("/openapi.json", None),
    ("/capacity", None),
    ("/live", None),
    ("/metrics", None),
    ("/debug/requests/{id}", None),
    ("/debug/steps", None),
    ("/debug/stacks", {}),
    ("/cache", None),
    ("/flush_cache", {}),
    ("/abort", {"all": True}),
]


@pytest.mark.parametrize(("path", "body"), ASKED, ids=[path for path, _ in ASKED])
async def test_requests_and_answers_are_as_it_says(path: str, body: Any) -> None:
    settings = replace(SETTINGS, access=Access(is_admin_open=True))
    transport = httpx.ASGITransport(
        create_app(FakeService(), settings, FakeControl(), FakeInsight())
    )
    async with httpx.AsyncClient(transport=transport, base_url="http://plait") as client:
        document = await document_of(client)
        method = "GET" if body is None else "POST"
        operation = document["paths"][path][method.lower()]
        named = KNOWN_REQUEST if path.startswith("/debug/requests") else "org/tiny-model"
        url = path.replace("{id}", named)
        answer = await client.request(method, url, json=body)
        assert answer.status_code == 200, answer.text
        media = answer.headers["content-type"].partition(";")[0]
        said = answer.json() if media == JSON else answer.text
        check(document, operation["responses"]["200"], said, media)
        if "requestBody" in operation:
            check(document, operation["requestBody"], body)
            refused = await client.post(url, json={**body, "model": 5, "id": 5})
            check(document, operation["responses"]["400"], refused.json())
            with pytest.raises(jsonschema.ValidationError):
                check(document, operation["requestBody"], {**body, "model": 5, "id": 5})
        unserved = await client.request("DELETE", url)
        check(document, operation["responses"]["default"], unserved.json())


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"prompt": "hi", "messages": None}, 200),
        ({"messages": MESSAGES}, 200),
        ({}, 400),
        ({"prompt": "hi", "messages": MESSAGES}, 400),
        ({"prompt": None}, 400),
        ({"prompt": ""}, 400),
    ],
)
async def test_what_is_tokenized_is_a_prompt_or_messages(
    client: httpx.AsyncClient, body: dict[str, Any], status: int
) -> None:
    document = await document_of(client)
    asked = document["paths"]["/tokenize"]["post"]["requestBody"]
    assert (await client.post("/tokenize", json=body)).status_code == status
    if status == 200:
        check(document, asked, body)
        return
    with pytest.raises(jsonschema.ValidationError):
        check(document, asked, body)


def check(document: Any, place: Any, value: Any, media_type: str = JSON) -> None:
    """Raises where `value` is not as the schema at `place` says."""
    schema = place["content"][media_type]["schema"]
    jsonschema.validate(value, {**schema, "components": document["components"]})


async def test_all_are_asked() -> None:
    told = {(method, path.replace(":path}", "}")) for method, path in OPERATIONS}
    assert {("GET" if body is None else "POST", path) for path, body in ASKED} == told
