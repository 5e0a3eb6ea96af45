"""HTTP/1.1 byte by byte: what is none is told so, and odd ways to ask are answered."""

import json
import socket
import ssl
import struct
from collections.abc import Iterator
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import pytest

from tests.server_process import REST_S, ServerProcess, body, serving

TLS = Path(__file__).parent / "tls"

# (what is sent, status, code, words of the message)
REFUSED = {
    "no request line": (b"\x00\xff\r\n\r\n", 400, "invalid_http", "illegal request line"),
    "line without a version": (b"GET /health\r\n\r\n", 400, "invalid_http", "request line"),
    "raw bytes in the path": (
        b"GET /v1/\xff HTTP/1.1\r\nhost: x\r\n\r\n", 400, "invalid_http", "request line"
    ),
    "no host": (b"GET /health HTTP/1.1\r\n\r\n", 400, "invalid_http", "Host"),
    "a header without a colon": (
        b"GET /health HTTP/1.1\r\nhost x\r\n\r\n", 400, "invalid_http", "header line"
    ),
    "a key before a space": (
        b"GET /health HTTP/1.1\r\nhost: x\r\nauthorization : Bearer secret\r\n\r\n",
        400, "invalid_http", "header line",
    ),
    "a length that is none": (
        b"POST /health HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n",
        400, "invalid_http", "Content-Length",
    ),
    "two lengths": (
        b"POST /health HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
        400, "invalid_http", "Content-Length",
    ),
    "an encoding that is not done": (
        b"POST /health HTTP/1.1\r\nhost: x\r\ntransfer-encoding: gzip\r\n\r\n",
        501, "unsupported_transfer_encoding", "chunked",
    ),
    "a chunk that is none": (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        400, "invalid_http", "chunk",
    ),
    "a long header": (
        b"GET /health HTTP/1.1\r\nhost: x\r\nx: " + b"a" * (1 << 20) + b"\r\n\r\n",
        431, "headers_too_large", "16384",
    ),
    "a header without end": (
        b"GET /health HTTP/1.1\r\nhost: x\r\nx: " + b"a" * (1 << 20),
        431, "headers_too_large", "16384",
    ),
    "many headers": (
        b"GET /health HTTP/1.1\r\nhost: x\r\n" + b"x: a\r\n" * (1 << 17) + b"\r\n",
        431, "headers_too_large", "16384",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with serving() as server:
        server.ready()
        yield server
        server.end_clean()


def read_all(peer: socket.socket) -> bytes:
    come = b""
    while part := peer.recv(1 << 16):
        come += part
    return come


def told(answer: bytes) -> tuple[int, dict[str, str], dict[str, Any]]:
    """Status, headers and error of an HTTP/1.1 answer, whose length must be right."""
    head, _, content = answer.partition(b"\r\n\r\n")
    line, *lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    assert headers["content-type"] == "application/json"
    assert int(headers["content-length"]) == len(content)
    error = json.loads(content)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return int(line.split()[1]), headers, error


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_http_is_told_so(server: ServerProcess, name: str) -> None:
    sent, status, code, words = REFUSED[name]
    with server.connect() as peer:
        peer.sendall(sent)
        got, headers, error = told(read_all(peer))
    assert (got, error["code"]) == (status, code)
    assert words in error["message"]
    assert "secret" not in error["message"] and "bytearray" not in error["message"]
    assert headers["connection"] == "close" and "server" not in headers


def test_what_is_no_http_is_told_so_over_tls() -> None:
    with serving(tls_cert=str(TLS / "cert.pem"), tls_key=str(TLS / "key.pem")) as server:
        server.ready()
        trusted = ssl.create_default_context(cafile=TLS / "cert.pem")
        with trusted.wrap_socket(server.connect(), server_hostname="localhost") as peer:
            peer.sendall(REFUSED["a long header"][0])
            response = HTTPResponse(peer)
            response.begin()
            error = json.loads(response.read())["error"]
        assert (response.status, error["code"]) == (431, "headers_too_large")


@pytest.mark.parametrize("resets", [False, True])
def test_a_client_that_leaves_with_a_request_waiting(server: ServerProcess, resets: bool) -> None:
    """Nothing is read behind that request, so that no read tells of the client's end."""
    asked = json.dumps(body("endless", max_tokens=4000)).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(asked)
    with server.connect() as peer:
        peer.sendall(head + asked + b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        while server.occupancy()["running"] < 1:
            pass
        if resets:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    server.wait_at_rest()


def test_requests_that_wait_are_answered_in_order(server: ServerProcess) -> None:
    last = b"GET /version HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    with server.connect() as peer:
        peer.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" * 3 + last)
        answers = read_all(peer).split(b"HTTP/1.1 200")[1:]
    assert [b'"state"' in answer for answer in answers] == [True, True, True, False]
    assert b'"version"' in answers[-1]


@pytest.mark.parametrize("upgrade", [b"websocket", b"h2c", b"Websocket"])
def test_an_upgrade_is_ignored(server: ServerProcess, upgrade: bytes) -> None:
    with server.connect() as peer:
        peer.sendall(
            b"GET /nowhere HTTP/1.1\r\nhost: x\r\nconnection: upgrade, close\r\nupgrade: "
            + upgrade + b"\r\nsec-websocket-version: 13\r\nsec-websocket-key: !\r\n\r\n"
        )  # fmt: skip
        status, _, error = told(read_all(peer))
    assert (status, error["code"]) == (404, "unknown_url")


@pytest.mark.parametrize("more", [
    b"transfer-encoding: chunked\r\ntrailer: x-t\r\n\r\n%x;a=b\r\n%s\r\n0\r\nx-t: 1\r\n\r\n",
    b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n%s",
])  # fmt: skip
def test_ways_to_send_a_body(server: ServerProcess, more: bytes) -> None:
    asked = json.dumps(body("hello")).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
    with server.connect() as peer:
        peer.sendall(head + more % (len(asked), asked))
        answer = read_all(peer)
    assert answer.startswith(b"HTTP/1.1 100 ") == (b"expect" in more)
    assert b'"text":"hellohel"' in answer


@pytest.mark.parametrize(
    ("target", "status"),
    [
        (b"http://plait/health", 200),
        (b"HTTPS://plait:443/health?x", 200),
        (b"http://plait", 200),
        (b"http://plait?/nowhere", 200),
        (b"http://plait/nowhere?/health", 404),
        (b"ftp://plait/health", 404),
        (b"http:///health", 404),
    ],
)
def test_a_target_may_be_a_whole_url(server: ServerProcess, target: bytes, status: int) -> None:
    with server.connect() as peer:
        peer.sendall(b"GET " + target + b" HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert int(read_all(peer).split()[1]) == status


def post(asked: dict[str, Any], version: bytes = b"1.1") -> bytes:
    content = json.dumps(asked).encode()
    head = b"POST /v1/completions HTTP/%b\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
    return head % (version, len(content)) + content


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("requests", [1, 3])
def test_a_client_that_sends_no_more_gets_its_answers(
    server: ServerProcess, stream: bool, requests: int
) -> None:
    with server.connect() as peer:
        peer.sendall(post(body("slow", stream=stream, max_tokens=60)) * requests)
        peer.shutdown(socket.SHUT_WR)
        come = read_all(peer)
    assert come.count(b"HTTP/1.1 200") == requests
    assert come.count(b"data: [DONE]" if stream else b'"completion_tokens":60') == requests
    assert come.count(b"HTTP/1.1 102") <= requests  # an interim response, to see who is there
    server.wait_at_rest()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("first", ["closes", "half-closes"])
def test_a_client_that_has_left_is_told_from_one_that_sends_no_more(
    server: ServerProcess, stream: bool, first: str
) -> None:
    with server.connect() as peer:
        peer.sendall(post(body("endless", stream=stream, max_tokens=4000)))
        while server.occupancy()["running"] < 1:
            pass
        if first == "half-closes":
            peer.shutdown(socket.SHUT_WR)
            peer.recv(1)
    server.wait_at_rest(limit_s=REST_S if first == "closes" or stream else 6.0)


def test_a_client_of_http_1_0_has_left_once_it_sends_no_more(server: ServerProcess) -> None:
    """It knows no interim response, by which others are told apart."""
    with server.connect() as peer:
        peer.sendall(post(body("endless", max_tokens=4000), b"1.0"))
        while server.occupancy()["running"] < 1:
            pass
        peer.shutdown(socket.SHUT_WR)
        server.wait_at_rest()
        assert read_all(peer) == b""


def test_a_request_that_is_cut_off_gets_no_answer(server: ServerProcess) -> None:
    with server.connect() as peer:
        peer.sendall(post(body("hello"))[:-5])
        peer.shutdown(socket.SHUT_WR)
        assert read_all(peer) == b""
