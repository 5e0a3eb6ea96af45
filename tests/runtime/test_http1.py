"""HTTP/1.1 that is none: its client is told so, whatever it still sends."""

import json
import socket
import ssl
from collections.abc import Iterator
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import pytest

from tests.server_process import ServerProcess, serving

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
        assert server.process.poll() is None, server.all_said()
        server.process.terminate()
        server.wait_exit()
        said = server.all_said()
        assert "Traceback" not in said and "ERROR" not in said, said


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
