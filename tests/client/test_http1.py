"""Many connections over HTTP/1.1: each request costs the same, and none meets another's rest."""

import asyncio
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from client import certificates
from client.target import Target, new_client

TLS = Path(__file__).parents[1] / "runtime" / "tls"
SOON_S = 20.0
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n"


class Server:
    """Answers what the path asks for, and remembers its connections. Owned by the loop."""

    def __init__(self) -> None:
        self.url = ""
        self.lines: list[str] = []  # of requests
        self.connections = 0
        self.open = 0
        self.change = asyncio.Condition()
        self.together = asyncio.Barrier(1)  # of /together

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        await self._count(+1)
        try:
            while await self._answer(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()
            await self._count(-1)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        line, *fields = head.split("\r\n")
        length = next((int(f[15:]) for f in fields if f.lower().startswith("content-length")), 0)
        sent = await reader.readexactly(length)
        self.lines.append(line)
        path = line.split()[1]
        if path.endswith("/half"):
            writer.write(HEAD + b"transfer-encoding: chunked\r\n\r\n5\r\nhello\r\n")
        elif path.endswith("/chunks"):
            chunks = b"2\r\nab\r\n3\r\ncde\r\n0\r\n\r\n"
            writer.write(HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunks)
        elif path.endswith("/twice"):
            writer.write((HEAD + b"content-length: 3\r\n\r\nabc") * 2)
        elif path.endswith("/cut"):
            writer.write(HEAD + b"content-length: 9\r\n\r\nabc")
            return False
        elif path.endswith("/to-the-end"):
            writer.write(HEAD + b"\r\nabc")
            return False
        elif not path.endswith("/never"):
            if path.endswith("/together"):
                await self.together.wait()
            writer.write(HEAD + b"content-length: %d\r\n\r\n" % len(sent) + sent)
        return not path.endswith("/then-closes")

    async def _count(self, more: int) -> None:
        async with self.change:
            self.open += more
            self.change.notify_all()

    async def wait_for(self, is_so: Callable[[], bool]) -> None:
        async with self.change, asyncio.timeout(SOON_S):
            await self.change.wait_for(is_so)


@asynccontextmanager
async def serving(tls: ssl.SSLContext | None = None) -> AsyncIterator[Server]:
    server = Server()
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0, ssl=tls)
    scheme = "http" if tls is None else "https"
    server.url = f"{scheme}://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    async with listening:
        yield server
        await server.wait_for(lambda: server.open == 0)  # each test closes what it opened


def run(
    test: Callable[[Server, httpx.AsyncClient], Awaitable[None]], tls: ssl.SSLContext | None = None
) -> None:
    async def main() -> None:
        async with serving(tls) as server, new_client(Target(server.url, "m")) as client:
            await test(server, client)

    asyncio.run(asyncio.wait_for(main(), SOON_S))


async def ask(client: httpx.AsyncClient, text: str, path: str = "/echo") -> None:
    answer = await client.post(path, content=text.encode())
    assert answer.status_code == 200 and answer.text == text


async def ask_together(server: Server, client: httpx.AsyncClient, count: int) -> None:
    """None is answered before all of them were heard."""
    server.together = asyncio.Barrier(count)
    await asyncio.gather(*(ask(client, str(index), "/together") for index in range(count)))


def test_one_after_the_other_share_a_connection() -> None:
    async def test(server: Server, client: httpx.AsyncClient) -> None:
        for index in range(5):
            await ask(client, "x" * index)
            assert (await client.get("/chunks")).text == "abcde"
        assert server.connections == 1

    run(test)


def test_as_many_connections_as_are_asked_at_a_time() -> None:
    async def test(server: Server, client: httpx.AsyncClient) -> None:
        for _ in range(3):
            await ask_together(server, client, 30)
        assert server.connections == 30 == server.open

    run(test)


async def calls_of(request: Callable[[], Awaitable[None]]) -> int:
    """How many Python functions are called until the request has been answered."""
    calls = 0

    def count(frame: object, event: str, arg: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        await request()
    finally:
        sys.setprofile(None)
    return calls


def test_a_request_costs_the_same_however_many_connections_wait() -> None:
    async def test(server: Server, client: httpx.AsyncClient) -> None:
        await ask(client, "first")
        alone = min([await calls_of(lambda: ask(client, "x")) for _ in range(5)])
        await ask_together(server, client, 200)
        assert server.open == 200
        beside_many = min([await calls_of(lambda: ask(client, "x")) for _ in range(5)])
        assert alone <= beside_many < 1.2 * alone  # 1.2: turns of the loop may differ
        assert server.connections == 200

    run(test)


def test_a_connection_that_the_server_closed_fails_no_request() -> None:
    async def test(server: Server, client: httpx.AsyncClient) -> None:
        for index in range(1, 6):
            await ask(client, "x", "/then-closes")
            await server.wait_for(lambda: server.open == 0)
            await ask(client, "y", "/then-closes")
            await server.wait_for(lambda: server.open == 0)
            assert server.connections == 2 * index

    run(test)


def test_all_connections_of_tls_share_what_they_believe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Authorities are read once, not for each connection."""
    read = list[ssl.SSLContext]()

    def tls_for(url: httpx.URL) -> ssl.SSLContext:
        read.append(certificates.tls_for(url))
        return read[-1]

    async def test(server: Server, client: httpx.AsyncClient) -> None:
        for _ in range(2):
            await ask_together(server, client, 9)
        async with client.stream("GET", "/half"):
            pass
        await ask(client, "whole")
        assert server.connections == 9 and server.url.startswith("https") and len(read) == 1

    monkeypatch.setattr("client.http1.tls_for", tls_for)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(TLS / "cert.pem", TLS / "key.pem")
    run(test, tls)


def test_what_nobody_asked_for_closes_a_connection() -> None:
    async def test(server: Server, client: httpx.AsyncClient) -> None:
        assert (await client.get("/twice")).text == "abc"
        await server.wait_for(lambda: server.open == 0)
        await ask(client, "whole")
        assert server.connections == 2

    run(test)


def test_an_answer_that_is_left_takes_its_connection_with_it() -> None:
    async def test(server: Server, client: httpx.AsyncClient) -> None:
        async with client.stream("GET", "/half") as response:
            async for part in response.aiter_raw():
                assert part == b"hello"
                break
        await server.wait_for(lambda: server.open == 0)
        await ask(client, "whole")
        assert server.connections == 2

    run(test)


@pytest.mark.parametrize("path", ["/half", "/never"])
def test_a_request_that_is_cancelled_takes_its_connection_with_it(path: str) -> None:
    async def test(server: Server, client: httpx.AsyncClient) -> None:
        await ask(client, "warm")
        for index in range(1, 4):
            waiting = asyncio.create_task(client.get(path))
            await until(lambda: len(server.lines) == 2 * index)  # noqa: B023
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await server.wait_for(lambda: server.open == 0)
            await ask(client, "whole")
            assert server.connections == 1 + index

    run(test)


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():
        await asyncio.sleep(0)


def test_an_answer_that_is_cut_is_an_error_and_one_without_a_length_is_none() -> None:
    async def test(server: Server, client: httpx.AsyncClient) -> None:
        with pytest.raises(httpx.RemoteProtocolError):
            await client.get("/cut")
        assert (await client.get("/to-the-end")).text == "abc"
        await ask(client, "whole")
        assert server.connections == 3

    run(test)


def test_nobody_there_fails_each_request_and_holds_nothing() -> None:
    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
        async with new_client(Target(f"http://127.0.0.1:{port}", "m")) as client:
            for _ in range(3):
                with pytest.raises(httpx.ConnectError):
                    await client.get("/")
            server = Server()
            async with await asyncio.start_server(server.serve, "127.0.0.1", port):
                await ask(client, "now")
                await client.aclose()
                await server.wait_for(lambda: server.open == 0)

    asyncio.run(asyncio.wait_for(main(), SOON_S))


def test_the_environments_proxy_is_asked_but_for_hosts_that_it_excepts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test(server: Server, _: httpx.AsyncClient) -> None:
        monkeypatch.setenv("http_proxy", server.url)
        async with new_client(Target("http://elsewhere.test", "m")) as client:
            await ask(client, "x")
        assert server.lines.pop() == "POST http://elsewhere.test/echo HTTP/1.1"
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        async with new_client(Target(server.url, "m")) as client:
            await ask(client, "x")
        assert server.lines.pop() == "POST /echo HTTP/1.1"

    run(test)
