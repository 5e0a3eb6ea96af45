"""The operator's routes: who may call them, and what they do."""

from dataclasses import replace
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from httpd.admin import admin_routes
from httpd.app import create_app
from httpd.auth import Access, Keyring
from httpd.errors import not_ready, on_rejected
from httpd.running import Running
from httpd.service import Rejected, State
from tests.fakes_control import FakeControl
from tests.fakes_service import FakeService
from tests.http.asgi_client import AsgiClient
from tests.http.conftest import SETTINGS

pytestmark = pytest.mark.anyio

KEYS, ADMINS = Keyring.of(["sk-user"]), Keyring.of(["sk-admin"])
OPEN = Access(is_admin_open=True)
ALL = {"all": True}

# (access, key given, status, code)
CASES = [
    (Access(KEYS, ADMINS), None, 401, "invalid_api_key"),
    (Access(KEYS, ADMINS), "wrong", 401, "invalid_api_key"),
    (Access(KEYS, ADMINS), "sk-user", 403, "admin_key_required"),
    (Access(KEYS, ADMINS), "sk-admin", 200, None),
    (Access(KEYS), None, 401, "invalid_api_key"),
    (Access(KEYS), "sk-user", 403, "admin_key_required"),
    (Access(KEYS), "sk-admin", 401, "invalid_api_key"),
    (Access(KEYS, is_admin_open=True), "sk-user", 200, None),
    (Access(admin_keys=ADMINS), None, 401, "invalid_api_key"),
    (Access(admin_keys=ADMINS), "wrong", 401, "invalid_api_key"),
    (Access(admin_keys=ADMINS), "sk-admin", 200, None),
    (Access(admin_keys=ADMINS, is_admin_open=True), None, 401, "invalid_api_key"),
    (Access(), None, 403, "admin_key_required"),
    (Access(), "sk-admin", 403, "admin_key_required"),
    (OPEN, None, 200, None),
    (OPEN, "unused", 200, None),
]


@pytest.mark.parametrize(("access", "key", "status", "code"), CASES)
@pytest.mark.parametrize("path", ["/flush_cache", "/abort", "/debug/stacks"])
async def test_who_may_administer(
    access: Access, key: str | None, status: int, code: str | None, path: str
) -> None:
    asked, control = asked_by(access, key, path)
    await asked.run()
    assert asked.status == status
    assert code is None or code in asked.body.decode()
    assert control.flushes == (status == 200 and path == "/flush_cache")
    assert control.aborts == (status == 200 and path == "/abort")


@pytest.mark.parametrize("path", ["/flush_cache\n", "/abort\n", "//flush_cache", "/abort/"])
async def test_no_other_path_leads_past_the_admin_key(path: str) -> None:
    """Starlette's router takes the first two, which are on nobody's list of paths."""
    for access, key in ((Access(KEYS, ADMINS), "sk-user"), (Access(), None)):
        asked, control = asked_by(access, key, path)
        await asked.run()
        assert asked.status in (403, 404)
        assert control.flushes == control.aborts == 0


def asked_by(access: Access, key: str | None, path: str) -> tuple[AsgiClient, FakeControl]:
    control = FakeControl()
    headers = [] if key is None else [(b"authorization", f"Bearer {key}".encode())]
    app = create_app(FakeService(), replace(SETTINGS, access=access), control)
    return AsgiClient(app, path, ALL, headers=headers), control


@pytest.mark.parametrize("name", [b"origin", b"forwarded", b"via", b"x-forwarded-for"])
async def test_the_open_door_is_for_direct_callers(name: bytes) -> None:
    """No web page may use it through a browser on this machine, and no client through a proxy."""
    control = FakeControl()
    app = create_app(FakeService(), replace(SETTINGS, access=OPEN), control)
    asked = AsgiClient(app, "/flush_cache", {}, headers=[(name, b"http://127.0.0.1:8000")])
    await asked.run()
    assert (asked.status, control.flushes) == (403, 0)


def client(control: FakeControl) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(
        create_app(FakeService(), replace(SETTINGS, access=OPEN), control)
    )
    return httpx.AsyncClient(transport=transport, base_url="http://plait")


async def test_flush_tells_the_pages_that_came_back() -> None:
    control = FakeControl()
    async with client(control) as calling:
        response = await calling.post("/flush_cache")
        assert (response.status_code, response.json()) == (200, {"freed_pages": 7})
        assert (await calling.get("/flush_cache")).status_code == 405
        control.refusal = not_ready(State.LOADING)
        refused = await calling.post("/flush_cache")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "loading")
    assert control.flushes == 1


async def test_abort_all() -> None:
    control = FakeControl()
    async with client(control) as calling:
        for body in (ALL, {"all": True, "id": None}):
            response = await calling.post("/abort", json=body)
            assert (response.status_code, response.json()) == (200, {"aborted": 3})
    assert control.aborts == 2


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"", 400, "invalid_json"),
        (b"[]", 400, "invalid_type"),
        (b"{}", 400, "missing_required_parameter"),
        (b'{"all": false}', 400, "missing_required_parameter"),
        (b'{"all": true, "id": "x"}', 400, "missing_required_parameter"),
        (b'{"all": 1}', 400, "invalid_type"),
        (b'{"id": 7}', 400, "invalid_type"),
        (b'{"id": ""}', 404, "response_not_found"),
        (b'{"id": "chatcmpl-none"}', 404, "response_not_found"),
        (b" " * 5000, 413, "request_too_large"),
    ],
)
async def test_bad_aborts(body: bytes, status: int, code: str) -> None:
    control = FakeControl()
    async with client(control) as calling:
        response = await calling.post("/abort", content=body)
        assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert control.aborts == 0


async def test_steps_are_told_as_lines() -> None:
    control = FakeControl()
    async with client(control) as calling:
        for query, count in (("", 100), ("?last=1", 1), ("?last=5000", 5000)):
            response = await calling.get(f"/debug/steps{query}")
            assert (response.status_code, response.text) == (200, '{"step": 1}\n')
            assert response.headers["content-type"] == "application/jsonl"
            assert control.reads[-1] == count
        for last in ("0", "-1", "x", "1.5", "", "²", "9" * 10):
            response = await calling.get("/debug/steps", params={"last": last})
            assert (response.status_code, response.json()["error"]["param"]) == (400, "last")
        assert len(control.reads) == 3


async def test_steps_are_for_an_admin() -> None:
    control = FakeControl()
    for access in (Access(KEYS, ADMINS), Access(KEYS), Access()):
        app = create_app(FakeService(), replace(SETTINGS, access=access), control)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://plait") as calling:
            answer = await calling.get("/debug/steps", headers={"authorization": "Bearer sk-user"})
            assert answer.status_code == 403
    assert control.reads == []


# One response by its id


def test_a_response_is_listed_while_it_is_made() -> None:
    running, ended = Running(), []
    with running.entry("cmpl-1", lambda: ended.append(1)):
        with running.entry("cmpl-2", lambda: ended.append(2)):
            assert running.try_end("cmpl-1") and not running.try_end("cmpl-3")
            assert (ended, len(running)) == ([1], 2)
        assert not running.try_end("cmpl-2")
    with pytest.raises(KeyError), running.entry("cmpl-1", lambda: None):
        raise KeyError
    assert len(running) == 0 and ended == [1]


async def test_abort_by_id() -> None:
    control, ended = FakeControl(), []
    app = Starlette(
        routes=admin_routes(control, OPEN, 1.0),
        exception_handlers={Rejected: on_rejected},
    )
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://plait") as calling:
        with control.running.entry("cmpl-1", lambda: ended.append(1)):
            answers: list[Any] = [
                (await calling.post("/abort", json={"id": name})).json()
                for name in ("cmpl-1", "cmpl-2")
            ]
    assert ended == [1] and answers[0] == {"aborted": 1}
    assert answers[1]["error"]["param"] == "id"
