"""Limits of every request: the length of its head, and the time that it may take."""

import asyncio
import json
from dataclasses import replace

import httpx
import pytest
from starlette.types import ASGIApp

from httpd.app import create_app
from httpd.head_limits import MAX_HEADERS, MAX_URL_BYTES
from tests.fakes_service import FakeService, delta
from tests.http.asgi_client import AsgiClient
from tests.http.conftest import SETTINGS

pytestmark = pytest.mark.anyio

TEXT = "/v1/completions"
ASKED = {"model": "org/tiny-model", "prompt": "x"}
TIMEOUT_S = 0.05


@pytest.mark.parametrize(("over", "status"), [(0, 404), (1, 414)])
async def test_the_length_of_a_url(client: httpx.AsyncClient, over: int, status: int) -> None:
    for query in (b"", b"?q=" + b"q" * 100):
        path = b"/".ljust(MAX_URL_BYTES - len(query.lstrip(b"?")) + over, b"x")
        response = await client.get(httpx.URL("http://plait", raw_path=path + query))
        assert response.status_code == status
        assert over == 0 or response.json()["error"]["code"] == "url_too_long"
        assert len(response.content) < 1000


@pytest.mark.parametrize(("headers", "status"), [(MAX_HEADERS, 200), (MAX_HEADERS + 1, 431)])
async def test_the_number_of_headers(headers: int, status: int) -> None:
    app = create_app(FakeService(), SETTINGS)
    asked = AsgiClient(app, "/version", {}, method="GET", headers=[(b"x", b"")] * headers)
    await asked.run()
    assert asked.status == status


# The request's time


def timed_app(service: FakeService) -> ASGIApp:
    return create_app(service, replace(SETTINGS, request_timeout_s=TIMEOUT_S))


async def test_a_request_in_time_is_left_alone() -> None:
    app = create_app(FakeService(), replace(SETTINGS, request_timeout_s=60.0))
    for stream in (False, True):
        asked = AsgiClient(app, TEXT, {**ASKED, "stream": stream})
        await asked.run()
        assert asked.status == 200 and asked.complete and b"timeout" not in asked.body


async def test_a_late_answer_is_a_504_and_gives_back_what_it_held() -> None:
    service = FakeService()
    service.produce.clear()
    asked = AsgiClient(timed_app(service), TEXT, ASKED)
    await asked.run()
    error = json.loads(asked.body)["error"]
    assert (asked.status, error["code"], error["type"]) == (504, "request_timeout", "server_error")
    assert "0.05 s" in error["message"] and asked.complete
    assert (b"x-should-retry", b"false") in asked.sent[0]["headers"]
    assert service.generations[0].aborts == 1


async def test_a_request_that_waits_for_its_turn_is_late_too() -> None:
    service = FakeService()
    service.accept.clear()
    asked = AsgiClient(timed_app(service), TEXT, {**ASKED, "stream": True})
    await asked.run()
    assert (asked.status, service.cancelled_submits) == (504, 1)


async def test_a_late_stream_ends_with_an_error_event() -> None:
    service = FakeService()
    service.produce.clear()
    chat = {"model": "org/tiny-model", "messages": [{"role": "user", "content": "x"}]}
    asked = AsgiClient(timed_app(service), "/v1/chat/completions", {**chat, "stream": True})
    await asked.run()
    assert asked.status == 200 and asked.complete
    opening, last, nothing = asked.body.decode().split("\n\n")
    assert '"role":"assistant"' in opening and nothing == ""
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "request_timeout"
    assert service.generations[0].aborts == 1


async def test_a_late_stream_ends_in_its_own_apis_words() -> None:
    """After some of the answer has come: its events are numbered on, and clients know their end."""
    turn = {"role": "user", "content": "x"}
    for path, more, last in (
        ("/v1/responses", {"input": "x"}, "response.failed"),
        ("/v1/messages", {"messages": [turn], "max_tokens": 9}, "error"),
    ):
        service = FakeService((delta("Hel", tokens=1), asyncio.Event()))
        body = {"model": "org/tiny-model", "stream": True, **more}
        asked = AsgiClient(timed_app(service), path, body)
        await asked.run()
        assert b"Hel" in asked.body
        *_, event, nothing = asked.body.decode().split("\n\n")
        name, data = (line.split(": ", 1)[1] for line in event.split("\n"))
        told = json.loads(data)
        assert (name, told["type"], nothing) == (last, last, "") and asked.complete
        if path == "/v1/responses":
            numbers = [
                json.loads(line.removeprefix("data: "))["sequence_number"]
                for line in asked.body.decode().split("\n")
                if line.startswith("data: ")
            ]
            assert numbers == list(range(len(numbers)))
            assert told["response"]["status"] == "failed"
        assert "0.05 s" in json.dumps(told)
        assert service.generations[0].aborts == 1


async def test_a_body_that_does_not_come_is_late() -> None:
    asked = AsgiClient(timed_app(FakeService()), TEXT)
    asked.feed(b"{", more=True)
    await asked.run()
    assert asked.status == 504
