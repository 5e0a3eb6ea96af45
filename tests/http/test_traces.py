"""Traces of requests: found by either id, counted, bounded, and not pushed out by strangers."""

from dataclasses import replace

import httpx
import pytest

from httpd.app import create_app
from httpd.auth import Access, Keyring
from httpd.traces import MOST_TRACES, Traces, current_trace
from tests.fakes_control import FakeControl
from tests.fakes_insight import FakeInsight
from tests.fakes_service import FakeService
from tests.http.conftest import SETTINGS

pytestmark = pytest.mark.anyio

PATH = "/v1/completions"
BODY = {"model": "org/tiny-model", "prompt": "hi"}


class Part:
    """Satisfies httpd.traces.Part."""

    def told(self, received_s: float) -> dict[str, object]:
        return {"since": received_s}


def client_of(traces: Traces, keys: Access = SETTINGS.access) -> httpx.AsyncClient:
    settings = replace(SETTINGS, access=keys)
    app = create_app(FakeService(), settings, FakeControl(), FakeInsight(), traces)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://plait")


async def test_what_became_of_requests_is_counted() -> None:
    traces = Traces(frozenset([PATH]))
    async with client_of(traces) as client:
        assert (await client.post(PATH, json=BODY)).status_code == 200
        assert (await client.post(PATH, json={"model": "org/tiny-model"})).status_code == 400
        assert (await client.get("/nowhere/" + "x" * 50)).status_code == 404
    assert traces.responses == {(PATH, 200): 1, (PATH, 400): 1, ("other", 404): 1}
    assert set(traces.refusals) == {"missing_required_parameter", "unknown_url"}
    assert current_trace() is None


async def test_a_stream_that_fails_is_known_by_its_error() -> None:
    traces = Traces(frozenset([PATH]))
    service = FakeService([RuntimeError("of ours")])
    app = create_app(service, SETTINGS, traces=traces)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://plait") as client:
        answer = await client.post(
            PATH, json={**BODY, "stream": True}, headers={"x-request-id": "r"}
        )
    trace = traces.find("r")
    assert trace is not None and trace.status == 200 and trace.error == "internal_error"
    assert trace.response_id is not None and trace.ended_s is not None
    assert traces.find(trace.response_id) is trace and "internal_error" in answer.text


async def test_strangers_push_nobody_out() -> None:
    traces = Traces(frozenset([PATH]))
    with traces.entry("mine", PATH) as trace:
        trace.parts.append(Part())
    access = Access(Keyring.of(["sk-user"]), Keyring.of(["sk-admin"]))
    async with client_of(traces, access) as client:
        for _ in range(20):
            assert (await client.post(PATH, json=BODY)).status_code == 401
            assert (await client.get("/debug/requests/mine")).status_code == 401
    assert list(traces._last) == [trace]
    assert traces.refusals["invalid_api_key"] == 40


async def test_only_the_last_are_kept() -> None:
    traces = Traces()
    for number in range(MOST_TRACES + 10):
        with traces.entry(f"r{number}", PATH) as trace:
            trace.parts.append(Part())
    assert traces.find("r9") is None and traces.find("r10") is not None
    with traces.entry("r500", PATH) as again:
        assert traces.find("r500") is again, "the youngest of an id"
    assert len(traces._open) == 0
