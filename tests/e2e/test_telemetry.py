"""Spans of a server, as a collector gets them."""

from collections.abc import Iterator

import httpx
import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from tests.fakes_collector import Collector, attributes_of, collecting
from tests.server_process import ServerProcess, body, serving

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PHASES = ["front_end.request", "queue", "prefill", "decode", "front_end.answer"]
PATH = "/v1/completions"


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as one:
        yield one


@pytest.fixture(scope="module")
def server(collector: Collector) -> Iterator[ServerProcess]:
    with serving(otlp_endpoint=collector.url) as one:
        yield one.ready()
        one.end_clean()


def ask(server: ServerProcess, traceparent: str | None = None, **more: object) -> None:
    headers = {} if traceparent is None else {"traceparent": traceparent.encode("latin-1")}
    answer = httpx.post(
        f"{server.url}{PATH}", json=body("abc", **more), headers=headers, timeout=20
    )
    assert answer.status_code in (200, 400)


def newest(collector: Collector, before: int, count: int) -> dict[bytes, list[Span]]:
    """The spans beyond the first `before`, by parent."""
    found: dict[bytes, list[Span]] = {}
    for span in collector.wait_for(before + count)[before:]:
        found.setdefault(span.parent_span_id, []).append(span)
    return found


def test_a_request_is_its_phases(server: ServerProcess, collector: Collector) -> None:
    before = len(collector.spans)
    ask(server, max_tokens=3, n=2)
    by_parent = newest(collector, before, 1 + 2 * 6)
    (request,) = by_parent[b""]
    assert (request.name, request.kind) == (PATH, Span.SPAN_KIND_SERVER)
    told = attributes_of(request)
    assert told["http.response.status_code"] == 200 and told["url.path"] == PATH
    assert str(told["gen_ai.response.id"]).startswith("cmpl-")
    generations = by_parent[request.span_id]
    assert [span.name for span in generations] == ["generation"] * 2
    for generation in generations:
        of_it = attributes_of(generation)
        assert (of_it["gen_ai.usage.input_tokens"], of_it["gen_ai.usage.output_tokens"]) == (3, 3)
        phases = by_parent[generation.span_id]
        assert [span.name for span in phases] == PHASES
        ends = [generation.start_time_unix_nano, *(span.end_time_unix_nano for span in phases)]
        assert [span.start_time_unix_nano for span in phases] == ends[:-1], "without a gap"
        assert ends == sorted(ends) and ends[-1] == generation.end_time_unix_nano
        assert generation.end_time_unix_nano <= request.end_time_unix_nano
    assert {span.trace_id for spans in by_parent.values() for span in spans} == {request.trace_id}


def test_the_clients_span_is_the_parent(server: ServerProcess, collector: Collector) -> None:
    before = len(collector.spans)
    ask(server, f"00-{TRACE_ID}-{SPAN_ID}-00")  # not sampled
    ask(server, f"00-{TRACE_ID}-{SPAN_ID}-01")
    by_parent = newest(collector, before, 7)
    (request,) = by_parent[bytes.fromhex(SPAN_ID)]
    assert request.trace_id.hex() == TRACE_ID
    assert len(collector.spans) == before + 7, "the first was not sent"


@pytest.mark.parametrize(
    "traceparent", ["", "00-0-1-01", f"00-{'0' * 32}-{SPAN_ID}-01", "x" * 5000, "00-\xff-1-01"]
)
def test_a_bad_traceparent_is_none(
    server: ServerProcess, collector: Collector, traceparent: str
) -> None:
    before = len(collector.spans)
    ask(server, traceparent)
    (request,) = newest(collector, before, 7)[b""]
    assert request.trace_id.hex() != TRACE_ID


def test_a_refusal_has_a_span(server: ServerProcess, collector: Collector) -> None:
    before = len(collector.spans)
    ask(server, temperature=-1)
    ((request,),) = newest(collector, before, 1).values()
    told = attributes_of(request)
    assert told["http.response.status_code"] == 400 and "error.type" in told
    assert request.status.code == Status.STATUS_CODE_UNSET, "a client's fault is none of a server's"


def test_the_resource_is_named(server: ServerProcess, collector: Collector) -> None:
    ask(server)
    collector.wait_for(1)
    (resource,) = collector.requests[0].resource_spans
    named = {each.key: each.value.string_value for each in resource.resource.attributes}
    assert named["service.name"] == "plait" and named["service.version"]
    assert set(collector.posts) == {"/v1/traces"}


@pytest.mark.parametrize("status", [None, 400, 503])
def test_a_collector_that_takes_nothing_hurts_nobody(status: int | None) -> None:
    """None: nobody listens there."""
    with collecting(status or 200) as collector:
        url = "http://127.0.0.1:9/v1/traces" if status is None else collector.url
        with serving(otlp_endpoint=url) as server:
            server.ready()
            ask(server)
            server.wait_for("traces cannot be sent")
            ask(server)
            server.process.terminate()
            assert server.wait_exit() == 0
            said = server.all_said()
            assert said.count("traces cannot be sent") == 1, said
            assert (
                "Traceback" not in said and "exit 0 all_ended=True left=['MainThread']" in said
            ), said
