"""The thread that sends traces, with a fake sender; and where it is told to send them."""

import logging
import threading
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from httpd.traces import Trace
from runtime.telemetry import settings
from runtime.telemetry.settings import (
    MISSING,
    endpoint_of_environment,
    endpoint_of_flag,
    telemetry_to,
)
from runtime.telemetry.thread import Ended, Telemetry, TraceSender, _Outcome
from tests.server_process import SOON_S

URL = "http://collector:4318/v1/traces"


class FakeSender:
    """Satisfies TraceSender. Takes what it gets, once `gate` is open."""

    def __init__(self, *answers: str | Exception | None, is_open: bool = True) -> None:
        self.sent: list[str] = []
        self.gate, self.reached = threading.Event(), threading.Event()
        self._answers = iter(answers)
        if is_open:
            self.gate.set()

    def send(self, ended: Sequence[Ended]) -> str | None:
        self.reached.set()
        self.gate.wait(SOON_S)
        self.sent += [each.timeline["request_id"] for each in ended]
        answer = next(self._answers, None)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def interrupt(self) -> None:
        self.gate.set()


def telemetry(sender: FakeSender, room: int = 64) -> Telemetry:
    made: TraceSender = sender
    return Telemetry(URL, 2, lambda _url: made, room)


def trace(name: str) -> Trace:
    return Trace(name, "/v1/completions", "00-of-the-client")


def test_what_is_left_is_sent_at_the_end_at_the_latest() -> None:
    sender = FakeSender()
    one = telemetry(sender)
    one.start()
    one.on_end(0)(trace("a"))
    one.on_end(1)(trace("b"))
    assert one.close(SOON_S)
    assert sorted(sender.sent) == ["a", "b"]


def test_nobody_waits_for_room(caplog: pytest.LogCaptureFixture) -> None:
    sender = FakeSender(is_open=False)
    one = telemetry(sender, room=4)
    leave = one.on_end(0)
    leave(trace("first"))
    one.start()
    assert sender.reached.wait(SOON_S)
    for index in range(10):
        leave(trace(str(index)))  # and it hangs
    assert one.close(0.05, SOON_S), "what hangs is interrupted"
    assert sender.sent == ["first", "0", "1", "2", "3"]
    lines = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert lines == [f"traces are sent to {URL}; of 6 requests they were lost"]


@pytest.mark.parametrize("failure", ["no route to host", OSError("no route to host")])
def test_a_dead_collector_is_said_once(
    failure: str | Exception, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.telemetry.thread._BATCH", 1)
    one = telemetry(FakeSender(failure, failure, failure))
    for index in range(5):
        one.on_end(0)(trace(str(index)))
    one.start()
    assert one.close(SOON_S)
    lines = [r.getMessage() for r in caplog.records]
    assert len(lines) == 2, lines
    assert lines[0].startswith(f"traces cannot be sent to {URL}") and "no route to" in lines[0]
    assert lines[1] == f"traces are sent to {URL}; of 3 requests they were lost"


def test_losses_again_and_again_are_said_once_a_minute(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now_s=0.0)
    monkeypatch.setattr("runtime.telemetry.thread.time.monotonic", lambda: clock.now_s)
    outcome = _Outcome(URL)
    for at_s, dropped in ((0.0, 0), (1.0, 5), (2.0, 9), (60.9, 20), (61.0, 30), (62.0, 40)):
        clock.now_s = at_s
        outcome.tell(None, 1, dropped)
    said = [record.getMessage().split("; ")[1] for record in caplog.records]
    assert said == ["of 5 requests they were lost", "of 25 requests they were lost"]


def test_a_library_that_fails_does_not_end_the_server(caplog: pytest.LogCaptureFixture) -> None:
    def make(_url: str) -> TraceSender:
        raise RuntimeError("no such wheel")

    one = Telemetry(URL.replace("//", "//me:secret@"), 1, make)
    one.start()
    one.on_end(0)(trace("a"))
    assert one.close(SOON_S) and "no such wheel" in caplog.text
    assert URL in caplog.text and "secret" not in caplog.text


def test_one_that_never_started_ends() -> None:
    assert telemetry(FakeSender()).close()
    assert telemetry_to(None, 1) is None


# Where to


@pytest.fixture(params=[True, False], ids=["there", "not there"])
def installed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(settings, "is_installed", lambda: request.param)
    return bool(request.param)


def test_a_flag_names_the_base(installed: bool) -> None:
    if not installed:
        with pytest.raises(ValueError, match="opentelemetry is not installed"):
            endpoint_of_flag("http://collector:4318")
        return
    assert endpoint_of_flag("http://collector:4318/") == URL
    assert endpoint_of_flag(URL) == endpoint_of_flag(f"{URL}/") == URL
    assert endpoint_of_flag(None) is None


@pytest.mark.parametrize("flag", ["collector:4318", "http://", "ftp://x", "http://x:99999"])
def test_a_flag_that_is_no_url_is_refused(flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "is_installed", lambda: True)
    with pytest.raises(ValueError, match=r"otlp_endpoint is .*; it must be like"):
        endpoint_of_flag(flag)


BASE, TRACES = "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"


@pytest.mark.parametrize(
    ("environ", "url", "said"),
    [
        ({}, None, None),
        ({BASE: ""}, None, None),
        ({BASE: "http://collector:4318"}, URL, None),
        ({BASE: "http://a", TRACES: "http://b/own"}, "http://b/own", None),
        ({BASE: "http://a", "OTEL_SDK_DISABLED": "True"}, None, None),
        ({BASE: "http://a", "OTEL_TRACES_EXPORTER": "none"}, None, None),
        ({BASE: "a:4317"}, None, "it must be like"),
        ({BASE: "http://a", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, None, "is for grpc"),
    ],
)
def test_the_environment_may_name_it(
    environ: dict[str, str], url: str | None, said: str | None, installed: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    assert endpoint_of_environment(environ) == (url if installed else None)
    said = said or (MISSING if url is not None and not installed else None)
    assert said is None or said in caplog.text
    assert bool(caplog.records) == (said is not None)
