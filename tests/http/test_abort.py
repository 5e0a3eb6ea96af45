"""An admin ends one response, of whatever endpoint, and its client is told."""

import asyncio
import re
from dataclasses import replace
from typing import Any

import httpx
import pytest

from httpd.app import create_app
from httpd.auth import Access
from tests.fakes_control import FakeControl
from tests.fakes_service import FakeService
from tests.http.asgi_client import AsgiClient
from tests.http.conftest import SETTINGS

pytestmark = pytest.mark.anyio

MESSAGES = [{"role": "user", "content": "hi"}]
SAID = b"ended this request before it was complete"


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES, "n": 2}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 3}),
    ],
)
async def test_a_stream_by_its_id(path: str, asked: Any) -> None:
    service = FakeService()
    service.produce.clear()
    app = create_app(service, replace(SETTINGS, access=Access(is_admin_open=True)), FakeControl())
    stream = AsgiClient(app, path, {"model": service.card.id, "stream": True, **asked})
    task = stream.start()
    while (found := re.search(rb'"id":"(\w+-?\w+)"', stream.body)) is None:
        await asyncio.sleep(0)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://plait") as calling:
        body = {"id": found[1].decode()}
        assert (await calling.post("/abort", json=body)).json() == {"aborted": 1}
        service.produce.set()
        await asyncio.wait_for(task, 5)
        assert SAID in stream.body and stream.complete
        assert (await calling.post("/abort", json=body)).status_code == 404


async def test_an_answer_that_is_not_a_stream() -> None:
    service = FakeService()
    service.produce.clear()
    asked = {"model": service.card.id, "prompt": "x"}
    whole = AsgiClient(create_app(service, SETTINGS), "/v1/completions", asked)
    task = whole.start()
    while not service.generations:
        await asyncio.sleep(0)
    service.generations[0].end()
    service.produce.set()
    await asyncio.wait_for(task, 5)
    assert whole.status == 503 and SAID in whole.body
