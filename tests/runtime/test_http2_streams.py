"""HTTP/2 frame by frame: a stream that is wrong fails alone."""

import json
from collections.abc import Iterator

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.settings
import pytest
from hpack import Encoder
from hyperframe.frame import ContinuationFrame, HeadersFrame

from tests.server_process import ServerProcess, body, serving

HEALTHY = 99


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with serving() as server:
        server.ready()
        yield server
        server.end_clean()


class Http2Client:
    """One connection whose frames the test writes itself. Owned by the test's thread."""

    def __init__(self, server: ServerProcess) -> None:
        config = h2.config.H2Configuration(
            header_encoding=None, validate_outbound_headers=False,
            normalize_outbound_headers=False,
        )  # fmt: skip
        self.protocol = h2.connection.H2Connection(config)
        self.protocol.initiate_connection()
        self.peer = server.connect()
        self.statuses: dict[int, int] = {}
        self.bodies: dict[int, bytes] = {}
        self.resets: dict[int, int] = {}
        self.ended: set[int] = set()

    def __enter__(self) -> "Http2Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.peer.close()

    def ask(
        self, stream_id: int, content: bytes = b"", *, ends: bool = True, **pseudo: bytes | None
    ) -> None:
        """Sends a request; `pseudo` replaces pseudo headers, or leaves them out."""
        wanted = {"method": b"POST", "path": b"/v1/completions", "scheme": b"http",
                  "authority": b"x", **pseudo}  # fmt: skip
        headers = [(b":" + k.encode(), v) for k, v in wanted.items() if v is not None]
        self.protocol.send_headers(stream_id, headers, end_stream=ends and not content)
        if content:
            self.protocol.send_data(stream_id, content, end_stream=ends)
        self.flush()

    def flush(self) -> None:
        self.peer.sendall(self.protocol.data_to_send())

    def wait(self, *stream_ids: int) -> None:
        """Returns once these are answered to their ends, or reset."""
        while not self.ended.union(self.resets).issuperset(stream_ids):
            self.receive()

    def receive(self) -> None:
        received = self.peer.recv(1 << 16)
        assert received, "the connection was closed"
        for event in self.protocol.receive_data(received):
            self._take(event)
        self.flush()

    def _take(self, event: h2.events.Event) -> None:
        assert not isinstance(event, h2.events.ConnectionTerminated), event
        if isinstance(event, h2.events.ResponseReceived):
            self.statuses[event.stream_id] = int(dict(event.headers)[b":status"])
        elif isinstance(event, h2.events.DataReceived):
            self.bodies[event.stream_id] = self.bodies.get(event.stream_id, b"") + event.data
            self.protocol.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        elif isinstance(event, h2.events.StreamEnded):
            self.ended.add(event.stream_id)
        elif isinstance(event, h2.events.StreamReset):
            self.resets[event.stream_id] = event.error_code


# The bad stream's pseudo headers; the status and code that it is told.
BAD_STREAMS: dict[str, tuple[dict[str, bytes | None], int, str]] = {
    "path": ({"path": b"/v1/\xff"}, 400, "invalid_path"),
    "query": ({"path": b"/health?\xff\xfe"}, 400, "invalid_path"),
    "method": ({"method": b"G\xc3\x96"}, 400, "invalid_method"),
    "CONNECT": ({"method": b"CONNECT", "path": None, "scheme": None}, 405, "method_not_allowed"),
    "websocket": (
        {"method": b"CONNECT", "protocol": b"websocket"}, 405, "method_not_allowed"
    ),
}  # fmt: skip


@pytest.mark.parametrize("ends", [True, False], ids=["complete", "more to come"])
@pytest.mark.parametrize("name", BAD_STREAMS)
def test_a_bad_stream_fails_alone(server: ServerProcess, name: str, ends: bool) -> None:
    pseudo, status, code = BAD_STREAMS[name]
    bad, *healthy = range(1, 2 * HEALTHY + 2, 2)
    with Http2Client(server) as client:
        client.ask(bad, ends=ends, **pseudo)
        if not ends:
            client.protocol.send_data(bad, b"late", end_stream=True)
        for stream_id in healthy:
            client.ask(stream_id, json.dumps(body(f"{stream_id}")).encode())
        client.wait(bad, *healthy)
        assert client.statuses[bad] == status
        assert json.loads(client.bodies[bad])["error"]["code"] == code
        for stream_id in healthy:
            assert client.statuses[stream_id] == 200
            text = json.loads(client.bodies[stream_id])["choices"][0]["text"]
            assert text.startswith(f"{stream_id}")


def test_a_bad_stream_that_is_reset_at_once(server: ServerProcess) -> None:
    with Http2Client(server) as client:
        for stream_id in (1, 3):
            headers = [(b":method", b"GET"), (b":path", b"/\xff"), (b":scheme", b"http"),
                       (b":authority", b"x")]  # fmt: skip
            client.protocol.send_headers(stream_id, headers, end_stream=stream_id == 1)
            client.protocol.reset_stream(stream_id)
        client.ask(5, path=b"/health", method=b"GET")
        client.wait(5)
        assert client.statuses == {5: 200}


def test_a_bad_stream_without_a_window_is_reset(server: ServerProcess) -> None:
    with Http2Client(server) as client:
        client.protocol.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 0})
        client.ask(1, path=b"/\xff")
        client.wait(1)
        assert client.resets == {1: h2.errors.ErrorCodes.PROTOCOL_ERROR}


@pytest.mark.parametrize("path", [b"/health", b"/\xff"])
def test_a_goodbye_right_behind_requests(server: ServerProcess, path: bytes) -> None:
    """h2 can answer none of them any more."""
    with Http2Client(server) as client:
        client.ask(1, ends=False)
        client.ask(3, path=path)
        client.protocol.send_data(1, b"{", end_stream=True)
        client.protocol.close_connection()
        client.flush()
        while client.peer.recv(1 << 16):
            pass


def test_a_response_before_the_end_of_its_request(server: ServerProcess) -> None:
    """Told to stop, a client may still have sent more; its other streams live on."""
    with Http2Client(server) as client:
        client.ask(1, b"x" * 1000, ends=False, path=b"/nowhere")
        while 1 not in client.statuses:
            client.receive()
        client.ask(3, json.dumps(body("hello")).encode())
        client.wait(1, 3)
        assert client.statuses == {1: 404, 3: 200}
        while not client.resets:  # it is sent after the response's end
            client.receive()
        assert client.resets == {1: h2.errors.ErrorCodes.NO_ERROR}


def test_a_body_that_is_too_large_harms_no_other_stream(server: ServerProcess) -> None:
    large, sent = b"x" * (11 << 20), 0
    with Http2Client(server) as client:
        client.ask(1, json.dumps(body("slow", max_tokens=100)).encode())
        client.ask(3, ends=False)
        while 3 not in client.statuses and sent < len(large):
            room = client.protocol.local_flow_control_window(3)
            size = min(room, client.protocol.max_outbound_frame_size)
            if size == 0:
                client.receive()
                continue
            client.protocol.send_data(3, large[sent : sent + size])
            client.flush()
            sent += size
        client.wait(1, 3)
        assert (client.statuses[3], client.statuses[1]) == (413, 200)
        assert json.loads(client.bodies[1])["usage"]["completion_tokens"] == 100


def test_priorities_mean_nothing(server: ServerProcess) -> None:
    """RFC 9113 took them back; Hypercorn's tree of them has room for 1,000 streams."""
    with Http2Client(server) as client:
        for stream_id in range(1, 5001, 2):
            client.protocol.prioritize(stream_id, weight=7, depends_on=stream_id + 2)
        client.ask(5001, path=b"/health", method=b"GET")
        client.wait(5001)
        assert client.statuses == {5001: 200}


def test_as_many_streams_as_are_allowed(server: ServerProcess) -> None:
    """The 1,001st ended its connection."""
    with Http2Client(server) as client:
        client.protocol.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 0})
        for stream_id in range(1, 2049, 2):
            client.ask(stream_id, path=b"/health", method=b"GET")
        client.protocol.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 65_535})
        client.flush()
        client.wait(*range(1, 2049, 2))
        assert set(client.statuses.values()) == {200}


def test_a_frame_that_is_too_long_is_refused_by_its_head(server: ServerProcess) -> None:
    with Http2Client(server) as client:
        client.flush()
        client.peer.sendall(b"\xff\xff\xff\x00\x00\x00\x00\x00\x01")  # 16 MiB of data to come
        ends: list[h2.events.ConnectionTerminated] = []
        while received := client.peer.recv(1 << 16):
            events = client.protocol.receive_data(received)
            ends += [each for each in events if isinstance(each, h2.events.ConnectionTerminated)]
        assert [end.error_code for end in ends] == [h2.errors.ErrorCodes.FRAME_SIZE_ERROR]


@pytest.mark.parametrize(("value_bytes", "is_taken"), [(18_000, True), (40_000, False)])
def test_a_header_block_that_takes_long_to_decode_is_refused(
    server: ServerProcess, value_bytes: int, is_taken: bool
) -> None:
    """By its length as it is sent, before any of it is decoded: 5 bits a letter here."""
    block = Encoder().encode([
        (":method", "GET"), (":path", "/health"), (":scheme", "http"), (":authority", "x"),
        ("x", "a" * value_bytes),
    ])  # fmt: skip
    parts = [block[at : at + 4000] for at in range(0, len(block), 4000)]
    frames = [HeadersFrame(1, parts[0], flags=["END_STREAM"])]
    frames += [ContinuationFrame(1, part) for part in parts[1:]]
    if is_taken:
        frames[-1].flags.add("END_HEADERS")
    with Http2Client(server) as client:
        client.flush()
        client.peer.sendall(b"".join(frame.serialize() for frame in frames))
        client.protocol.get_next_available_stream_id()
        come = b""
        while part := client.peer.recv(1 << 16):
            come += part
            if is_taken and b'"state"' in come:
                break
    assert (b'"state"' in come) == is_taken


def test_many_frames_at_once_are_all_taken(server: ServerProcess) -> None:
    """In several turns of the loop."""
    with Http2Client(server) as client:
        content = json.dumps(body("hello")).encode()
        for stream_id in range(1, 1200, 2):
            client.protocol.send_headers(stream_id, [
                (b":method", b"POST"), (b":path", b"/v1/completions"), (b":scheme", b"http"),
                (b":authority", b"x"),
            ])  # fmt: skip
            if stream_id > 1:
                client.protocol.reset_stream(stream_id)
        client.protocol.send_data(1, content, end_stream=True)
        client.flush()
        client.wait(1)
        assert client.statuses[1] == 200
    server.wait_at_rest()
