"""Heads beyond their limits on real sockets; each harms its own connection at most."""

from collections.abc import Iterator

import httpx
import pytest

from httpd.head_limits import MAX_HEADERS, MAX_URL_BYTES
from tests.e2e.test_keys import http2
from tests.server_process import SOON_S, ServerProcess, serving

PSEUDO = [(":method", "POST"), (":scheme", "http"), (":authority", "x")]
PATH = [*PSEUDO, (":path", "/v1/completions")]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with serving() as server:
        yield server.ready()
        assert server.ask("abc").status_code == 200
        server.process.terminate()
        assert server.wait_exit() == 0
        assert "Traceback" not in server.all_said()


@pytest.mark.parametrize("http2", [False, True], ids=["HTTP/1.1", "HTTP/2"])
def test_long_urls_and_many_headers(server: ServerProcess, http2: bool) -> None:
    with httpx.Client(base_url=server.url, http1=not http2, http2=http2, timeout=SOON_S) as client:
        long = client.get("/" + "x" * MAX_URL_BYTES)
        assert (long.status_code, long.json()["error"]["code"]) == (414, "url_too_long")
        many = client.get("/health", headers=[("x", "y")] * MAX_HEADERS)
        assert (many.status_code, many.json()["error"]["code"]) == (431, "headers_too_large")
        assert client.get("/health").status_code == 200


def test_a_body_with_two_lengths(server: ServerProcess) -> None:
    """It is refused and its connection closed: its end might be the next request's beginning."""
    smuggled = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
    both = b"Content-Length: %d\r\nTransfer-Encoding: chunked\r\n\r\n" % (5 + len(smuggled))
    with server.connect() as connection:
        connection.sendall(head + both + b"0\r\n\r\n" + smuggled)
        told = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    assert told.startswith(b"HTTP/1.1 400") and b"two_body_lengths" in told
    assert told.count(b"HTTP/1.1") == 1
    assert server.ask("abc").status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        [("x", "y" * (100 << 10))],
        [("x", "y" * 1000)] * 1000,  # a HPACK bomb: a few bytes each, after the first
        [(f"x-{n}", "") for n in range(20_000)],
    ],
    ids=["one", "repeated", "many"],
)
def test_headers_beyond_the_limit_over_http2(
    server: ServerProcess, headers: list[tuple[str, str]]
) -> None:
    status, content = http2(server, [*PATH, *headers])
    assert status in ("431", None) and b"choices" not in content
    assert server.ask("abc").status_code == 200
