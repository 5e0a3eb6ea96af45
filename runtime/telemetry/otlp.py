"""Timelines as OpenTelemetry's spans, sent by OTLP over HTTP.

    request ─┬─ generation ─┬─ front_end.request   headers, validation, template, encoding
             │              ├─ queue
             │              ├─ prefill
             │              ├─ decode
             │              └─ front_end.answer    detokenising, sending
             └─ generation …                       one for each choice

The parts of a generation follow each other without a gap, as the metrics' do. A client's
`traceparent` makes its span the parent, and where it says that nothing is sampled, nothing is sent.

Imported by the telemetry thread alone: the library takes seconds and may not be there.
"""

import logging
import os
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Final

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.trace import SpanKind, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from runtime.telemetry.thread import Ended

_PHASES: Final = ("front_end.request", "queue", "prefill", "decode", "front_end.answer")
_NAMED_BY: Final = ("OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES")


class OtlpSender:
    """Satisfies runtime.telemetry.thread.TraceSender. Owned by the telemetry thread."""

    def __init__(self, endpoint: str, version: str) -> None:
        """Takes the library's log lines away: what matters of them is told by `send`."""
        self._said = _LastWord()
        library = logging.getLogger("opentelemetry")
        library.addHandler(self._said)
        library.propagate = False
        self._exporter = OTLPSpanExporter(endpoint=endpoint)
        self._spans = Spans(version)

    def send(self, ended: Sequence[Ended]) -> str | None:
        spans = self._spans.of(ended)
        if not spans:
            return None
        self._said.word = ""
        if self._exporter.export(spans) is SpanExportResult.SUCCESS:
            return None
        return self._said.word or "no reason is known"

    def interrupt(self) -> None:
        self._exporter.shutdown()  # type: ignore[no-untyped-call]


class _LastWord(logging.Handler):
    """The first line of what a library complains of. Safe from any thread."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.word = ""  # replaced whole

    def emit(self, record: logging.LogRecord) -> None:
        self.word = self.word or record.getMessage().partition("\n")[0]


class Spans:
    """Makes spans of requests that have ended. Owned by the telemetry thread."""

    def __init__(self, version: str) -> None:
        named = any("service.name" in os.environ.get(n, "") for n in _NAMED_BY[1:])
        named = named or bool(os.environ.get(_NAMED_BY[0]))
        own: dict[str, AttributeValue] = {} if named else {"service.name": "plait"}
        resource = Resource.create({**own, "service.version": version})
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._made = _Made()
        provider.add_span_processor(self._made)
        self._tracer: Tracer = provider.get_tracer("plait", version)
        self._propagator = TraceContextTextMapPropagator()

    def of(self, ended: Sequence[Ended]) -> list[ReadableSpan]:
        """All spans of these requests; none of those that are not sampled."""
        for each in ended:
            self._request(each.timeline, each.traceparent)
        return self._made.taken()

    def _request(self, told: dict[str, Any], traceparent: str) -> None:
        begun_s, ended_s = told["received_s"], told["ended_s"] or 0.0
        context = self._propagator.extract({"traceparent": traceparent}) if traceparent else None
        span = self._tracer.start_span(
            told["path"], context, SpanKind.SERVER, _known({
                "url.path": told["path"],
                "http.response.status_code": told["status"],
                "error.type": told["error"],
                "gen_ai.response.id": told["response_id"],
                "plait.request_id": told["request_id"],
            }), start_time=_ns(begun_s),
        )  # fmt: skip
        if told["error"] is not None and (told["status"] or 500) not in range(400, 500):
            span.set_status(StatusCode.ERROR, told["error"])
        for part in told["parts"]:
            self._generation(set_span_in_context(span), part, begun_s, ended_s)
        span.end(_ns(begun_s + ended_s))

    def _generation(self, parent: Any, part: dict[str, Any], begun_s: float, end_s: float) -> None:
        """
        begun_s  unix time of the request, from which all else counts
        end_s    its end
        """
        finish = part["finish"]
        span = self._tracer.start_span(
            "generation", parent, attributes=_known({
                "gen_ai.usage.input_tokens": part["prompt_tokens"],
                "gen_ai.usage.output_tokens": part["output_tokens"],
                "gen_ai.response.finish_reasons": None if finish is None else (finish,),
                "plait.cached_tokens": part["cached_tokens"],
                "plait.number": part["number"],
            }), start_time=_ns(begun_s),
        )  # fmt: skip
        within = set_span_in_context(span)
        last_s = end_s
        for name, from_s, last_s in phases(part, end_s):
            phase = self._tracer.start_span(name, within, start_time=_ns(begun_s + from_s))
            phase.end(_ns(begun_s + last_s))
        span.end(_ns(begun_s + last_s))


def phases(part: dict[str, Any], end_s: float) -> Iterator[tuple[str, float, float]]:
    """(name, start, end) of what a generation went through; the last may be cut by its end.

    part  as `Tracked.told`, times from the request's start;  end_s  when the request ended
    """
    queued_s = part["encoded_s"] if part["queued_s"] is None else part["queued_s"]
    marks = (
        0.0, queued_s, part["begun_s"], part["first_token_s"], part["last_token_s"], part["sent_s"]
    )  # fmt: skip
    for name, (from_s, to_s) in zip(_PHASES, pairwise(marks), strict=True):
        assert from_s is not None, "the loop ends with the mark that never came"
        yield name, from_s, end_s if to_s is None else to_s
        if to_s is None:
            return


def _known(attributes: dict[str, AttributeValue | None]) -> dict[str, AttributeValue]:
    return {name: value for name, value in attributes.items() if value is not None}


def _ns(unix_s: float) -> int:
    return int(unix_s * 1e9)


class _Made(SpanProcessor):
    """Keeps spans as they end. Owned by the telemetry thread."""

    def __init__(self) -> None:
        self._spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        if span.context.trace_flags.sampled:
            self._spans.append(span)

    def taken(self) -> list[ReadableSpan]:
        spans, self._spans = self._spans, []
        return spans
