"""Paths, methods, headers, states and body sizes: what holds for every route."""

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from httpd.app import create_app
from httpd.service import State
from tests.fakes_service import FakeService
from tests.http.conftest import SETTINGS

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"


async def test_models(client: httpx.AsyncClient) -> None:
    listed = (await client.get("/v1/models")).json()
    (card,) = listed["data"]
    assert listed["object"] == "list"
    assert card["id"] == card["root"] == "org/tiny-model"
    assert (card["object"], card["max_model_len"]) == ("model", 64)
    assert (await client.get("/v1/models/org/tiny-model")).json() == card
    assert (await client.get("/v1/models/org%2Ftiny-model")).json() == card
    for other in ("gpt", "", "%FF", "org/tiny-model/"):
        response = await client.get(f"/v1/models/{other}")
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("state", [State.LOADING, State.DRAINING, State.FAILED])
async def test_only_health_and_version_answer_outside_of_ready(
    client: httpx.AsyncClient, service: FakeService, state: State
) -> None:
    service.current_state = state
    health = await client.get("/health")
    assert health.status_code == (503 if state is State.FAILED else 200)
    told = health.json()
    occupancy = told.pop("occupancy")
    assert told == {"state": state.value, "gil_enabled": False, "version": "9.9"}
    assert (occupancy is None) == (state is State.LOADING)
    assert occupancy is None or occupancy["available_pages"] == occupancy["total_pages"] == 8
    assert (await client.get("/version")).json() == {"version": "9.9"}
    refused = [
        await client.get(path) for path in ("/ready", "/server_info", "/v1/models", "/v1/models/x")
    ]
    refused += [await client.post(path, json={}) for path in (CHAT, "/v1/completions")]
    for response in refused:
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) > 0
        error = response.json()["error"]
        assert (error["type"], error["code"]) == ("server_error", state.value)


@pytest.mark.parametrize("encoding", ["gzip", "GZIP", "br", "identity, gzip", "x" * 300, "\\xff"])
@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/tokenize"])
async def test_compressed_bodies(
    client: httpx.AsyncClient, service: FakeService, path: str, encoding: str
) -> None:
    """A few kilobytes could become any number of gigabytes; and what is plain is not guessed."""
    headers = {"content-encoding": encoding.encode("latin-1")}
    response = await client.post(path, content=b"{}", headers=headers)
    assert response.status_code == 415
    assert response.headers["accept-encoding"] == "identity"
    error = response.json()["error"]
    assert "Content-Encoding" in error["message"] and len(error["message"]) < 200
    assert path == "/v1/messages" or error["code"] == "unsupported_content_encoding"
    plain = await client.post(path, content=b"{}", headers={"content-encoding": " Identity"})
    assert plain.status_code == 400
    assert not service.submissions


async def test_a_router_learns_what_is_served(client: httpx.AsyncClient) -> None:
    told = (await client.get("/server_info")).json()
    assert told["served_model_name"] == (await client.get("/v1/models")).json()["data"][0]["id"]


async def test_ready(client: httpx.AsyncClient) -> None:
    response = await client.get("/ready")
    assert (response.status_code, response.json()) == (200, {"state": "ready"})
    assert (await client.head("/health")).status_code == 200


@pytest.mark.parametrize(
    "path",
    ["/index.html", "/v1", "//v1/models", "/v1/chat/completions/", "/health/",
     "/v1/%2e%2e/health", "/%FF", "/HEALTH", "/v1/chat%00", "/@evil"],
)  # fmt: skip
async def test_unknown_paths(client: httpx.AsyncClient, path: str) -> None:
    for headers in ({}, {"host": "x/health?"}, {"host": "evil.example"}):
        response = await client.get(
            httpx.URL("http://plait", raw_path=path.encode()), headers=headers
        )
        assert response.status_code == 404
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["code"] == "unknown_url"
        assert "location" not in response.headers


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", CHAT), ("PUT", CHAT), ("POST", "/health"), ("DELETE", "/v1/models/x"),
     ("OPTIONS", CHAT), ("HANDLE", CHAT), ("_get", "/health")],
)  # fmt: skip
async def test_wrong_methods(client: httpx.AsyncClient, method: str, path: str) -> None:
    response = await client.request(method, path)
    assert response.status_code == 405
    assert response.headers["allow"]
    assert response.json()["error"]["code"] == "method_not_allowed"


@pytest.mark.parametrize("sane", ["abc-1.2:3/4=", "x" * 128])
async def test_request_id_is_echoed(client: httpx.AsyncClient, sane: str) -> None:
    for path in ("/health", "/nowhere"):
        response = await client.get(path, headers={"x-request-id": sane})
        assert response.headers.get_list("x-request-id") == [sane]


@pytest.mark.parametrize("odd", ["", "x" * 129, "a b", "a\tb", "é", "<script>"])
async def test_odd_request_ids_are_replaced(client: httpx.AsyncClient, odd: str) -> None:
    response = await client.get("/health", headers={"x-request-id": odd.encode()})
    assert response.headers["x-request-id"].startswith("req_")


async def test_own_faults_tell_nothing(client: httpx.AsyncClient, service: FakeService) -> None:
    """CVE-2026-22778, CVE-2026-54236."""
    service.refusal = RuntimeError("secret at 0x7f00")
    for more in ({}, {"stream": True}):
        body = {"model": "org/tiny-model", "messages": [{"role": "user", "content": "x"}], **more}
        response = await client.post(CHAT, json=body)
        assert response.status_code == 500
        assert "secret" not in response.text
        assert response.json()["error"]["code"] == "internal_error"
        assert response.headers["x-should-retry"] == "false"
        assert response.headers["x-request-id"]


async def test_cors_is_off_by_default(client: httpx.AsyncClient) -> None:
    response = await client.get("/health", headers={"origin": "http://ui"})
    assert not [name for name in response.headers if name.startswith("access-control")]


async def test_cors() -> None:
    service = FakeService()
    service.refusal = RuntimeError("x")
    app = create_app(service, replace(SETTINGS, cors_origins=("http://ui",)))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://plait") as client:
        headers = {"origin": "http://ui", "access-control-request-method": "POST",
                   "access-control-request-headers": "authorization,content-type"}  # fmt: skip
        response = await client.options(CHAT, headers=headers)
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == "http://ui"
        body = {"model": "org/tiny-model", "messages": [{"role": "user", "content": "x"}]}
        for path in (CHAT, "/nowhere"):  # a browser must be able to read errors too
            response = await client.post(path, json=body, headers={"origin": "http://ui"})
            assert response.headers["access-control-allow-origin"] == "http://ui"
        response = await client.get("/health", headers={"origin": "http://other"})
        assert "access-control-allow-origin" not in response.headers


def padded(size: int) -> bytes:
    """A good completions body of exactly `size` bytes."""
    body = b'{"model": "org/tiny-model", "prompt": "x"'
    return body + b" " * (size - len(body) - 1) + b"}"


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
async def test_declared_body_over_the_limit(client: httpx.AsyncClient, path: str) -> None:
    response = await client.post(path, content=padded(4097))
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (413, "request_too_large")
    assert "4096" in error["message"] and "4097" in error["message"]


async def test_streamed_bodies_are_counted(client: httpx.AsyncClient) -> None:
    def pieces(size: int) -> Any:
        async def generate() -> AsyncIterator[bytes]:
            body = padded(size)
            for start in range(0, size, 512):
                yield body[start : start + 512]

        return generate()

    assert (await client.post("/v1/completions", content=pieces(4096))).status_code == 200
    response = await client.post("/v1/completions", content=pieces(4097))
    assert response.status_code == 413
