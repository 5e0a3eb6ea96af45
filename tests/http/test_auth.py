"""Keys in front of the routes: who gets in, and every way round that was ever tried elsewhere."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest

from httpd.app import create_app
from httpd.auth import Access, Keyring
from tests.fakes_control import FakeControl
from tests.fakes_service import FakeService
from tests.http.asgi_client import AsgiClient
from tests.http.conftest import SETTINGS

pytestmark = pytest.mark.anyio

KEY, OTHER_KEY, ADMIN_KEY = "sk-first", "sk-second", "sk-admin"
KEYS = Keyring.of([KEY, OTHER_KEY])
ADMINS = Keyring.of([ADMIN_KEY])
BOTH = Access(api_keys=KEYS, admin_keys=ADMINS)
COMPLETION = {"model": "org/tiny-model", "prompt": "x"}

Headers = list[tuple[bytes, bytes]]


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def app(access: Access, **more: Any) -> Any:
    return create_app(FakeService(), replace(SETTINGS, access=access, **more), FakeControl())


@asynccontextmanager
async def calling(access: Access, **more: Any) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app(access, **more))
    async with httpx.AsyncClient(transport=transport, base_url="http://plait") as client:
        yield client


def assert_no_key(response: httpx.Response) -> None:
    assert response.status_code == 401, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.headers["x-request-id"]


# Keyrings


def test_a_keyring_opens_for_its_keys_alone() -> None:
    for key in (KEY, OTHER_KEY):
        assert KEYS.opens([key.encode()])
        assert KEYS.opens([b"wrong", key.encode()])
    for wrong in (b"", b"wrong", KEY[:-1].encode(), KEY.encode() + b"x", KEY.upper().encode()):
        assert not KEYS.opens([wrong])
    assert not KEYS.opens([])
    assert not Keyring().opens([b""])
    assert (len(KEYS), len(Keyring()), len(Keyring.of([KEY, KEY]))) == (2, 0, 1)


def test_every_key_is_compared_whole_whatever_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """No early exit and no `==`: the time must not tell a right beginning (CVE-2025-59425)."""
    compared: list[tuple[bytes, bytes]] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return one == other

    monkeypatch.setattr("httpd.auth.hmac.compare_digest", compare)
    for given in (KEY, OTHER_KEY, "w"):
        compared.clear()
        KEYS.opens([given.encode()])
        assert len(compared) == 2
        assert all(len(one) == len(other) == 32 for one, other in compared)


def test_no_key_and_no_digest_shows_in_a_repr() -> None:
    shown = repr(replace(SETTINGS, access=BOTH))
    assert "sk-" not in shown and "digests" not in shown


# Which requests pass


@pytest.mark.parametrize("key", [KEY, OTHER_KEY, ADMIN_KEY])
@pytest.mark.parametrize(
    "form",
    ["authorization: Bearer {}", "authorization: bearer {}", "Authorization: BEARER   {} ",
     "X-Api-Key: {}", "x-api-key:  {} "],
)  # fmt: skip
async def test_a_key_opens_the_api(key: str, form: str) -> None:
    name, _, value = form.format(key).partition(":")
    async with calling(BOTH) as client:
        for path in ("/v1/models", "/version"):
            assert (await client.get(path, headers={name: value})).status_code == 200
        answer = await client.post("/v1/completions", json=COMPLETION, headers={name: value})
        assert answer.status_code == 200


async def test_either_header_may_hold_the_key() -> None:
    """Clients for several APIs send both."""
    async with calling(BOTH) as client:
        for headers in (
            {"x-api-key": KEY, **bearer("unused")},
            {"x-api-key": "unused", **bearer(KEY)},
        ):
            assert (await client.get("/v1/models", headers=headers)).status_code == 200


ODD_HEADERS: list[Headers] = [
    [],
    [(b"authorization", b"")],
    [(b"authorization", b"Bearer")],
    [(b"authorization", b"Bearer ")],
    [(b"authorization", b"Bearer wrong")],
    [(b"authorization", KEY.encode())],
    [(b"authorization", b"Basic " + KEY.encode())],
    [(b"authorization", b"Bearer\t" + KEY.encode())],
    [(b"authorization", b"Bearer" + KEY.encode())],
    [(b"authorization", b"Bearer " + KEY.encode() + b" x")],
    [(b"authorization", b"Bearer " + KEY.encode() + b",")],
    [(b"authorization", b"Bearer " + KEY.encode() + b"\x00")],
    [(b"authorization", b'Bearer "' + KEY.encode() + b'"')],
    [(b"authorization", b"Bearer " + KEY.upper().encode())],
    [(b"authorization", b"Bearer \xff\xfe")],
    [(b"authorization", b"Bearer " + b"k" * 8000)],
    [(b"authorization", b"Bearer " + KEY.encode())] * 2,
    [(b"authorization", b"Bearer " + KEY.encode()), (b"authorization", b"Bearer wrong")],
    [(b"authorization", b"Bearer wrong"), (b"authorization", b"Bearer " + KEY.encode())],
    [(b"x-api-key", KEY.encode()), (b"x-api-key", b"wrong")],
    [(b"x-api-key", b"")],
    [(b"x-api-key", b"Bearer " + KEY.encode())],
    [(b"api-key", KEY.encode())],
    [(b"cookie", b"authorization=Bearer " + KEY.encode())],
    [(b"proxy-authorization", b"Bearer " + KEY.encode())],
    [(b"x-forwarded-for", b"127.0.0.1")],
    [(b"x-original-url", b"/health"), (b"x-rewrite-url", b"/health")],
]


@pytest.mark.parametrize("headers", ODD_HEADERS, ids=str)
async def test_odd_headers_open_nothing(headers: Headers) -> None:
    asked = AsgiClient(app(BOTH), "/v1/completions", COMPLETION, headers=headers)
    await asked.run()
    assert asked.status == 401 and b"invalid_api_key" in asked.body
    assert KEY.encode() not in asked.body and b"kkkk" not in asked.body


# As HTTP servers make them of a request's target: percent-decoded, and otherwise as they came.
ODD_PATHS = [
    "", "//", "/\n", "/?", "/.", "/index.html", "/\x00", "*", "/cache", "/live", "/capacity",
    "/health/", "//health", "/health\n", "/health\x00", "/HEALTH", "/health;x",
    "/health#", "/health?", "/ready/", "/./health", "/v1/../health", "/health/../v1/models",
    "/health/v1/models", "http://plait/health", "http://plait/v1/models", "plait:80", "@evil",
    "health", "/v1/models", "//v1/models", "/v1/models/", "/v1/models\n", "/V1/MODELS",
    "/v1/models/org/tiny-model", "/flush_cache", "/flush_cache\n", "/abort", "/version",
    "/nowhere", "/openapi.json", "/docs", "/metrics", "\\health", "/health\\..\\v1\\models",
    "/%68ealth", "/%2fhealth", "/he\u0430lth",
]  # fmt: skip


@pytest.mark.parametrize("path", ODD_PATHS)
@pytest.mark.parametrize("method", ["GET", "POST", "HEAD", "OPTIONS", "PUT", "GETX", ""])
async def test_no_path_passes_without_a_key(path: str, method: str) -> None:
    """The decision is by `scope["path"]` alone (CVE-2026-48746); 401 comes before 404 and 405."""
    for headers in ([], [(b"host", b"x/health?")], [(b"host", b"plait"), (b"host", b"/ready")]):
        asked = AsgiClient(
            app(BOTH), path, {}, method=method, headers=headers, raw_path=path.encode()
        )
        await asked.run()
        assert asked.status == 401, (path, method, headers)


async def test_a_query_string_and_a_raw_path_decide_nothing() -> None:
    for more in ({"query_string": b"x=/health"}, {"raw_path": b"/health"}, {"root_path": "/v1"}):
        asked = AsgiClient(app(BOTH), "/v1/models", {}, method="GET", **more)
        await asked.run()
        assert asked.status == 401


async def test_web_sockets_need_a_key_too() -> None:
    asked = AsgiClient(app(BOTH), "/v1/realtime", type="websocket")
    await asked.run()
    assert asked.sent == [{"type": "websocket.close", "code": 1008}]


async def test_health_and_ready_are_public() -> None:
    async with calling(BOTH) as client:
        for path in ("/health", "/ready"):
            for headers in ({}, bearer("wrong"), bearer(KEY)):
                assert (await client.get(path, headers=headers)).status_code == 200
            assert (await client.post(path)).status_code == 405


async def test_unknown_paths_are_404_with_a_key() -> None:
    async with calling(BOTH) as client:
        response = await client.get("/nowhere", headers=bearer(KEY))
        assert (response.status_code, response.json()["error"]["code"]) == (404, "unknown_url")


async def test_without_keys_the_api_is_open_whatever_is_sent() -> None:
    for access in (Access(), Access(admin_keys=ADMINS)):
        async with calling(access) as client:
            for headers in ({}, bearer("unused"), {"authorization": "Basic x"}):
                assert (await client.get("/v1/models", headers=headers)).status_code == 200


async def test_a_key_is_repeated_to_nobody(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="httpd"):
        async with calling(BOTH) as client:
            refused = await client.get("/v1/models", headers=bearer("sk-mistyped"))
            unknown = await client.get("/nowhere", headers=bearer(KEY))
    assert_no_key(refused)
    for text in (refused.text, unknown.text, str(refused.headers), caplog.text):
        assert "sk-" not in text


async def test_the_two_ways_to_lack_a_key_are_told_apart() -> None:
    async with calling(BOTH) as client:
        for headers, told in [
            ({}, "You did not provide an API key."),
            ({"authorization": "Basic x"}, "You did not provide an API key."),
            (bearer("wrong"), "Incorrect API key provided."),
        ]:
            response = await client.get("/v1/models", headers=headers)
            assert_no_key(response)
            assert response.json()["error"]["message"].startswith(told)


async def test_a_large_body_without_a_key_is_read_to_its_end_and_refused() -> None:
    async with calling(BOTH) as client:
        assert_no_key(await client.post("/v1/completions", content=b"x" * 100_000))


# Browsers


async def test_a_preflight_needs_no_key_and_the_refusal_can_be_read() -> None:
    origin = {"origin": "http://ui"}
    preflight = {**origin, "access-control-request-method": "POST",
                 "access-control-request-headers": "authorization"}  # fmt: skip
    async with calling(BOTH, cors_origins=("http://ui",)) as client:
        for path in ("/v1/models", "/nowhere"):
            allowed = await client.options(path, headers=preflight)
            assert allowed.status_code == 200
            assert allowed.headers["access-control-allow-origin"] == "http://ui"
            assert allowed.headers["access-control-allow-headers"] == "authorization"
            refused = await client.get(path, headers=origin)
            assert_no_key(refused)
            assert refused.headers["access-control-allow-origin"] == "http://ui"
            assert_no_key(await client.options(path))  # no preflight
        foreign = await client.options("/v1/models", headers={**preflight, "origin": "http://x"})
        assert foreign.status_code == 400
        assert "access-control-allow-origin" not in foreign.headers


async def test_without_cors_a_preflight_is_a_request_like_any() -> None:
    preflight = {"origin": "http://ui", "access-control-request-method": "POST"}
    async with calling(BOTH) as client:
        assert_no_key(await client.options("/v1/models", headers=preflight))


async def test_credentials_never_go_with_any_origin() -> None:
    for origins in (("*",), ("http://ui",)):
        async with calling(BOTH, cors_origins=origins) as client:
            headers = {
                "origin": "http://ui",
                "cookie": "a=b",
                "access-control-request-method": "GET",
            }
            for method in ("GET", "OPTIONS"):
                response = await client.request(method, "/v1/models", headers=headers)
                assert response.headers["access-control-allow-origin"] in (*origins, "http://ui")
                assert "access-control-allow-credentials" not in response.headers


# Whose prefixes are whose


async def test_callers_share_prefixes_unless_keys_are_isolated() -> None:
    namespaces: dict[bool, list[str]] = {}
    for isolates in (False, True):
        service = FakeService()
        settings = replace(SETTINGS, access=BOTH, isolates_keys=isolates)
        transport = httpx.ASGITransport(create_app(service, settings, FakeControl()))
        async with httpx.AsyncClient(transport=transport, base_url="http://plait") as client:
            for headers in (
                bearer(KEY), {"x-api-key": KEY}, bearer(OTHER_KEY), bearer(ADMIN_KEY),
                {**bearer("wrong"), "x-api-key": KEY},
            ):  # fmt: skip
                for salt in ("", "s"):
                    body = {**COMPLETION, "cache_salt": salt}
                    answer = await client.post("/v1/completions", json=body, headers=headers)
                    assert answer.status_code == 200
        namespaces[isolates] = [job.namespace for job in service.submissions]
    assert namespaces[False] == ["", "s"] * 5
    one, salted, *rest = namespaces[True]
    assert rest[:2] == rest[-2:] == [one, salted], "a key is one caller, in either header"
    assert len(set(namespaces[True])) == 6 and "" not in namespaces[True]
    assert not any("sk-" in name for name in namespaces[True])
