"""A client that leaves or dawdles: the generation is given back in every phase."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from engine.request import SamplingParams, TextPrompt
from httpd.app import CHAT as CHAT_API
from httpd.app import create_app
from httpd.call import Call, Telling
from httpd.endpoint import Endpoint
from httpd.running import Running
from httpd.service import Job
from tests.fakes_service import FakeService
from tests.http.asgi_client import AsgiClient
from tests.http.conftest import SETTINGS

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
FAST = replace(SETTINGS, ping_interval_s=0.01, body_timeout_s=0.03)


def body(stream: bool) -> dict[str, Any]:
    messages = [{"role": "user", "content": "hi"}]
    return {"model": "org/tiny-model", "messages": messages, "stream": stream}


def client_of(service: FakeService, *, stream: bool, settings: Any = SETTINGS) -> AsgiClient:
    return AsgiClient(create_app(service, settings), CHAT, body(stream))


async def ended(task: "asyncio.Task[None]") -> None:
    """The app returns on its own, without an error, and leaves no task behind."""
    async with asyncio.timeout(5):
        await task
    await asyncio.sleep(0)
    left = [task.get_coro().__qualname__ for task in asyncio.all_tasks()]
    assert not [name for name in left if name.startswith(("Endpoint", "EventStream", "_wait"))]


async def test_before_the_body_is_complete(service: FakeService) -> None:
    client = AsgiClient(create_app(service, SETTINGS), CHAT)
    client.feed(b'{"model":', more=True)
    client.leave()
    await ended(client.start())
    assert client.sent == [] and service.submissions == []


@pytest.mark.parametrize("stream", [False, True])
async def test_while_submit_is_pending(service: FakeService, stream: bool) -> None:
    service.accept.clear()
    client = client_of(service, stream=stream)
    task = client.start()
    await service.submitting.wait()
    client.leave()
    await ended(task)
    assert service.cancelled_submits == 1 and client.sent == []


@pytest.mark.parametrize("stream", [False, True])
async def test_before_the_first_token(service: FakeService, stream: bool) -> None:
    service.produce.clear()
    client = client_of(service, stream=stream)
    task = client.start()
    await service.submitting.wait()
    while not service.generations:
        await asyncio.sleep(0)
    (generation,) = service.generations
    await generation.waiting.wait()
    client.leave()
    await ended(task)
    assert generation.aborts == 1
    assert [message["type"] for message in client.sent] == (
        ["http.response.start", "http.response.body"] if stream else []
    )


@pytest.mark.parametrize("stream", [False, True])
async def test_in_the_middle(service: FakeService, stream: bool) -> None:
    service.produce.clear()
    client = client_of(service, stream=stream)
    task = client.start()
    while not service.generations:
        await asyncio.sleep(0)
    (generation,) = service.generations
    await generation.waiting.wait()
    generation.waiting.clear()
    service.produce.set()
    service.produce.clear()  # one waiter was woken: one delta
    await generation.waiting.wait()
    client.leave()
    await ended(task)
    assert generation.aborts == 1 and not client.complete
    assert (b"Hel" in client.body) == stream


async def test_while_a_write_is_blocked(service: FakeService) -> None:
    client = client_of(service, stream=True)
    client.reading.clear()
    task = client.start()
    while not service.generations:
        await asyncio.sleep(0)
    client.leave()
    await ended(task)
    assert service.generations[0].aborts == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_after_the_end_aborts_nothing(service: FakeService, stream: bool) -> None:
    client = client_of(service, stream=stream)
    await ended(client.start())
    client.leave()
    assert client.status == 200 and client.complete
    assert service.generations[0].aborts == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stopping_server_gives_back_too(service: FakeService, stream: bool) -> None:
    service.produce.clear()
    task = client_of(service, stream=stream).start()
    while not service.generations:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert service.generations[0].aborts == 1


async def test_pings_in_silence(service: FakeService) -> None:
    service.produce.clear()
    client = client_of(service, stream=True, settings=FAST)
    task = client.start()
    while client.body.count(b": ping\n\n") < 3:
        client.got_message.clear()
        await client.got_message.wait()
    service.produce.set()
    await ended(task)
    frames = client.body.split(b"\n\n")
    assert all(frame in (b": ping", b"") or frame.startswith(b"data: ") for frame in frames)
    assert client.complete and client.body.endswith(b"data: [DONE]\n\n")


async def test_no_ping_comes_while_a_write_is_blocked(service: FakeService) -> None:
    service.produce.clear()
    client = client_of(service, stream=True, settings=FAST)
    task = client.start()
    await client.got_message.wait()
    client.reading.clear()
    service.produce.set()
    await asyncio.sleep(5 * FAST.ping_interval_s)
    client.reading.set()
    await ended(task)
    assert b"ping" not in client.body and client.complete


async def test_a_slow_body_times_out(service: FakeService) -> None:
    client = AsgiClient(create_app(service, FAST), CHAT)
    client.feed(b'{"model":', more=True)
    await ended(client.start())
    assert client.status == 408 and b"body_timeout" in client.body


LENGTH = [(b"content-length", b"5000")]
CHUNKED = [(b"transfer-encoding", b"chunked")]


@pytest.mark.parametrize("version", ["1.1", "2"])
@pytest.mark.parametrize("headers", [LENGTH, CHUNKED])
@pytest.mark.parametrize("path", [CHAT, "/nowhere", "/health"])
async def test_an_answer_ends_after_its_request(
    service: FakeService, headers: list[tuple[bytes, bytes]], path: str, version: str
) -> None:
    app = create_app(service, SETTINGS)
    client = AsgiClient(app, path, headers=headers, http_version=version)
    task = client.start()
    for _ in range(5):
        client.feed(b" " * 1000, more=True)
    await client.got_message.wait()
    for _ in range(20):
        await asyncio.sleep(0)
    assert client.status == {CHAT: 413, "/nowhere": 404, "/health": 405}[path]
    assert b'"error"' in client.body and not client.complete
    client.feed(b"", more=False)
    await ended(task)
    assert client.complete
    names = {name for name, _ in client.sent[0]["headers"]}
    assert not names & {b"connection", b"transfer-encoding", b"keep-alive"}  # HTTP/2 forbids them


@pytest.mark.parametrize("version", ["1.1", "2"])
@pytest.mark.parametrize(("limit", "value"), [("DRAIN_BYTES", 6000), ("DRAIN_TIMEOUT_S", 0.01)])
async def test_draining_has_an_end(
    service: FakeService, monkeypatch: pytest.MonkeyPatch, limit: str, value: float, version: str
) -> None:
    monkeypatch.setattr(f"httpd.body.{limit}", value)
    app = create_app(service, SETTINGS)
    client = AsgiClient(app, "/nowhere", headers=CHUNKED, http_version=version)
    for _ in range(6):
        client.feed(b" " * 1000, more=True)
    await ended(client.start())
    assert client.complete


async def test_draining_ends_with_the_client(service: FakeService) -> None:
    client = AsgiClient(create_app(service, SETTINGS), "/nowhere", http_version="2")
    client.leave()
    await ended(client.start())
    assert client.status == 404


async def test_the_body_is_not_kept_while_the_answer_is_made(
    service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    freed = asyncio.Event()

    class Body(bytes):
        def __del__(self) -> None:
            freed.set()

    async def read(*_: Any) -> bytes:
        return Body(json.dumps(body(stream=True)).encode())

    monkeypatch.setattr("httpd.endpoint.read_body", read)
    service.accept.clear()
    client = client_of(service, stream=True)
    task = client.start()
    await service.submitting.wait()
    assert freed.is_set()
    service.accept.set()
    await ended(task)
    assert client.status == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_the_prompt_is_not_kept_while_the_answer_is_made(
    service: FakeService, stream: bool
) -> None:
    freed = asyncio.Event()

    class Text(str):
        def __del__(self) -> None:
            freed.set()

    def parse(*_: Any) -> Call:
        job = Job(TextPrompt(Text("hi")), (SamplingParams(max_new_tokens=1),), True)
        return Call((job,), Telling(stream, False, False), unknown_fields=())

    service.produce.clear()
    client = AsgiClient(
        Endpoint(replace(CHAT_API, parse=parse), service, SETTINGS, Running()), CHAT, {}
    )
    task = client.start()
    while not service.generations:
        await asyncio.sleep(0)
    service.submissions.clear()
    await service.generations[0].waiting.wait()
    assert freed.is_set()
    service.produce.set()
    await ended(task)
    assert client.status == 200
