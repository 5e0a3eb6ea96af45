"""A server with keys, attacked on its sockets: whatever is written there, no route is reached."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h2.config
import h2.connection
import h2.events
import httpx
import pytest

from tests.server_process import SOON_S, ServerProcess, body, serving

KEY, ADMIN_KEY = "sk-of-a-user", "sk-of-an-admin"
TEXT = "/v1/completions"
REQUEST = json.dumps(body("abc")).encode()

Pairs = list[tuple[str, str]]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("keys")
    (folder / "api").write_text(f"# users\n{KEY}\n")
    (folder / "admin").write_text(ADMIN_KEY)
    for file in folder.iterdir():
        file.chmod(0o600)
    with serving(
        api_key_file=str(folder / "api"), admin_key_file=str(folder / "admin"), access_log=True
    ) as server:
        yield server.ready()
        assert server.process.poll() is None, server.all_said()
        server.process.terminate()
        assert server.wait_exit() == 0
        said = server.all_said()
        assert "sk-" not in said and "Traceback" not in said, said


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def http1(
    server: ServerProcess, target: bytes, head: bytes = b"host: x", method: str = "POST"
) -> bytes:
    """All that the server says to one request."""
    with server.connect() as peer:
        peer.sendall(
            b"%b %b HTTP/1.1\r\n%b\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b"
            % (method.encode(), target, head, len(REQUEST), REQUEST)
        )
        return read_all(peer)


def read_all(peer: socket.socket) -> bytes:
    come = b""
    while part := peer.recv(1 << 16):
        come += part
    return come


def http2(server: ServerProcess, headers: Pairs) -> tuple[str | None, bytes]:
    """The status, None where the connection or the stream was ended; and the body."""
    config = h2.config.H2Configuration(
        validate_outbound_headers=False, normalize_outbound_headers=False
    )
    connection = h2.connection.H2Connection(config)
    with server.connect() as peer:
        connection.initiate_connection()
        connection.send_headers(1, headers)
        connection.send_data(1, REQUEST, end_stream=True)
        peer.sendall(connection.data_to_send())
        status, content = None, b""
        while part := peer.recv(1 << 16):
            for event in connection.receive_data(part):
                if isinstance(event, h2.events.ResponseReceived):
                    status = dict(event.headers)[b":status"].decode()
                elif isinstance(event, h2.events.DataReceived):
                    content += event.data
                elif isinstance(event, h2.events.StreamEnded | h2.events.StreamReset):
                    return status, content
                elif isinstance(event, h2.events.ConnectionTerminated):
                    return status, content
        return status, content


TARGETS = [
    b"/v1/completions", b"//v1/completions", b"/v1//completions", b"/v1/completions/",
    b"/v1/completions?x=/health", b"/v1/completions#/health", b"/health/../v1/completions",
    b"/health/%2e%2e/v1/completions", b"/%2e/v1/completions", b"/v1/%63ompletions",
    b"/v1%2fcompletions", b"/health%2f..%2fv1%2fcompletions", b"/v1/completions%00",
    b"/v1/completions%0a", b"/v1/completions%20", b"/V1/COMPLETIONS", b"/health%00/v1/completions",
    b"/health;/v1/completions", b"http://x/v1/completions", b"HTTP://x//health", b"http:///health",
    b"http://x/health/../v1/completions", b"http://x/health/v1", b"http://x/nowhere",
    b"http://x#/health", b"http://x@y/v1/completions", b"http://http://x/health", b"ftp://x/health",
    b"x:80", b"*", b"@evil", b"health", b"/%68ealth%0a", b"/health%3f", b"/nowhere",
    b"/flush_cache", b"/flush_cache%0a", b"//flush_cache", b"/abort", b"/abort?all=true",
]  # fmt: skip
HOSTS = ["x", "x/health?", "x/health#", "/health", "x:80/health?", "@health", "health", "[::1]"]


@pytest.mark.parametrize("target", TARGETS, ids=bytes.decode)
def test_no_target_reaches_a_route(guarded: ServerProcess, target: bytes) -> None:
    for host in HOSTS:
        come = http1(guarded, target, b"host: " + host.encode())
        assert come.startswith((b"HTTP/1.1 401 ", b"HTTP/1.1 400 ")), come
        pairs = [(":method", "POST"), (":path", target.decode()), (":scheme", "http")]
        status, content = http2(guarded, [*pairs, (":authority", host)])
        assert status in ("401", "400", None), content
        status, content = http2(guarded, [*pairs, (":authority", "x"), ("host", host)])
        assert status in ("401", "400", None), content


HEADS = [
    b"host: x\r\nauthorization: Bearer wrong",
    b"host: x\r\nauthorization: Bearer",
    b"host: x\r\nauthorization: Bearer wrong\r\nauthorization: Bearer " + KEY.encode(),
    b"host: x\r\nx-api-key: wrong\r\nx-api-key: " + KEY.encode(),
    b"host: x\r\nauthorization: Basic " + KEY.encode(),
    b"host: x\r\nauthorization : Bearer " + KEY.encode(),
    b"host: x\r\nauthorization: Bearer\r\n " + KEY.encode() + b"x",
    b"host: x\r\nauthorization:\r\nBearer: " + KEY.encode(),
    b"host: x\r\nauthorization_: Bearer " + KEY.encode(),
    b"host: x\r\nx-forwarded-for: 127.0.0.1\r\nx-original-url: /health",
    b"host: x\r\nx-http-method-override: OPTIONS",
    b"host: x\r\nhost: y",
    b"upgrade: websocket\r\nhost: x",
    b"upgrade: h2c\r\nhttp2-settings: AAAA\r\nhost: x",
]


@pytest.mark.parametrize("head", HEADS, ids=str)
def test_no_header_opens_a_route(guarded: ServerProcess, head: bytes) -> None:
    come = http1(guarded, TEXT.encode(), head)
    assert come.startswith((b"HTTP/1.1 401 ", b"HTTP/1.1 400 ")), come
    assert b"sk-" not in come


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "PUT", "TRACE", "PRI", "GETX", "get"])
def test_no_method_passes(guarded: ServerProcess, method: str) -> None:
    come = http1(guarded, TEXT.encode(), method=method)
    assert come.startswith((b"HTTP/1.1 401 ", b"HTTP/1.1 400 ")), come


@pytest.mark.parametrize(
    "extra",
    [
        [("authorization", "Bearer wrong"), ("authorization", f"Bearer {KEY}")],
        [("x-api-key", "wrong"), ("x-api-key", KEY)],
        [("Authorization", f"Bearer {KEY}")],
        [("authorization ", f"Bearer {KEY}")],
        [(":authorization", f"Bearer {KEY}")],
        [("authorization", "Bearer wrong\r\nx: y")],
        [(":path", "/health")],
        [(":authority", "x"), ("host", "x/health?")],
        [(":method", "OPTIONS")],
    ],
    ids=str,
)
def test_no_field_of_http2_opens_a_route(guarded: ServerProcess, extra: Pairs) -> None:
    pairs = [(":method", "POST"), (":path", TEXT), (":scheme", "http"), (":authority", "x")]
    status, content = http2(guarded, [*pairs, *extra])
    assert status in ("401", "400", None)
    assert b"sk-" not in content and b"choices" not in content


def test_a_stream_without_a_key_changes_nothing_for_its_neighbour(guarded: ServerProcess) -> None:
    with httpx.Client(base_url=guarded.url, http1=False, http2=True, timeout=SOON_S) as client:
        for _ in range(3):
            assert client.post(TEXT, json=body("abc")).status_code == 401
            answer = client.post(TEXT, json=body("abc"), headers=bearer(KEY))
            assert answer.json()["choices"][0]["text"] == "abcabcab"


@pytest.mark.parametrize("http2", [False, True], ids=["HTTP/1.1", "HTTP/2"])
def test_with_a_key(guarded: ServerProcess, http2: bool) -> None:
    with httpx.Client(base_url=guarded.url, http1=not http2, http2=http2, timeout=SOON_S) as client:
        assert client.get("/health").status_code == client.get("/ready").status_code == 200
        for headers in (bearer(KEY), {"x-api-key": KEY}, bearer(ADMIN_KEY)):
            assert client.get("/v1/models", headers=headers).status_code == 200
            assert client.post(TEXT, json=body("abc"), headers=headers).status_code == 200
            assert client.get("/nowhere", headers=headers).status_code == 404
        assert client.post("/flush_cache", headers=bearer(KEY)).status_code == 403
        assert client.post("/abort", json={"all": True}, headers=bearer(KEY)).status_code == 403


def test_an_admin_flushes_the_cache_and_ends_what_runs(guarded: ServerProcess) -> None:
    admin: dict[str, Any] = {"headers": bearer(ADMIN_KEY), "timeout": SOON_S}
    first, second = (httpx.post(f"{guarded.url}/flush_cache", **admin).json() for _ in range(2))
    assert first["freed_pages"] in (0, 7) and second == {"freed_pages": 0}
    endless = {**body("endless"), "stream": True}
    with httpx.stream(
        "POST", f"{guarded.url}{TEXT}", json=endless, headers=bearer(KEY), timeout=SOON_S
    ) as stream:
        events = stream.iter_lines()
        next(events)
        aborted = httpx.post(f"{guarded.url}/abort", json={"all": True}, **admin)
        assert aborted.json() == {"aborted": 1}
        last = [line for line in events if line][-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "aborted"


def test_keys_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLAIT_API_KEYS", f"{KEY}, sk-other")
    with serving() as server:
        server.ready()
        models = f"{server.url}/v1/models"
        assert httpx.get(models, timeout=SOON_S).status_code == 401
        for key in (KEY, "sk-other"):
            assert httpx.get(models, headers=bearer(key), timeout=SOON_S).status_code == 200
        assert httpx.post(f"{server.url}/flush_cache", headers=bearer(KEY)).status_code == 403
        environ = Path(f"/proc/{server.process.pid}/cmdline").read_bytes()
        assert b"sk-" not in environ


def test_without_keys_a_caller_on_this_machine_is_an_admin() -> None:
    with serving() as server:
        server.ready()
        flush = f"{server.url}/flush_cache"
        assert httpx.post(flush, timeout=SOON_S).json() == {"freed_pages": 7}
        page = {"origin": "http://evil.example"}
        assert httpx.post(flush, headers=page, timeout=SOON_S).status_code == 403
    with serving(host="0.0.0.0") as server:
        server.ready()
        assert server.url.startswith("http://127.0.0.1:"), "which somebody can call"
        assert httpx.post(f"{server.url}/flush_cache", timeout=SOON_S).status_code == 403


def test_a_request_beyond_its_time_is_ended() -> None:
    with serving(request_timeout_s=0.2) as server:
        server.ready()
        late = httpx.post(f"{server.url}{TEXT}", json=body("endless"), timeout=SOON_S)
        assert (late.status_code, late.json()["error"]["code"]) == (504, "request_timeout")
        streamed = httpx.post(
            f"{server.url}{TEXT}", json={**body("endless"), "stream": True}, timeout=SOON_S
        )
        assert streamed.status_code == 200
        last = streamed.text.split("\n\n")[-2].removeprefix("data: ")
        assert json.loads(last)["error"]["code"] == "request_timeout"
        server.wait_at_rest()
        assert server.ask("abc").status_code == 200
