"""Several HTTP loops in one server: what they share, and what each has of its own."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import httpx
import pytest

from httpd.service import Rejected
from runtime.config import usual_http_loops
from runtime.listener import Listener
from runtime.queue_limit import QueueCounts, QueueLimit
from runtime.request_ids import loop_of, request_ids
from tests.server_process import SOON_S, ServerProcess, body, serving

ENDLESS = body("endless", stream=True, max_tokens=4000)


@pytest.fixture(scope="module", params=[1, 2, 4])
def server(request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    """Twelve requests at most: eight that run and four that wait."""
    with serving(http_loops=request.param, max_queued=4, drain_timeout_s=0.0) as server:
        yield server.ready()
        server.end_clean()
        assert "exit 0 all_ended=True left=['MainThread']" in server.all_said()


@pytest.mark.parametrize(
    ("processors", "gil", "loops"),
    [(1, False, 1), (7, False, 1), (8, False, 2), (16, False, 4), (128, False, 4), (128, True, 1)],
)
def test_loops_follow_processors(processors: int, gil: bool, loops: int) -> None:
    assert usual_http_loops(processors, gil) == loops


def test_ids_tell_the_loop() -> None:
    for loops in (1, 2, 5):
        given = [request_ids(loop, loops) for loop in range(loops)]
        ids = [[next(one) for _ in range(3)] for one in given]
        assert [[loop_of(each, loops) for each in one] for one in ids] == [
            [loop] * 3 for loop in range(loops)
        ]
        assert len(set().union(*ids)) == 3 * loops and 0 not in set().union(*ids)


@pytest.mark.parametrize("version", ["HTTP/1.1", "HTTP/2"])
def test_each_client_gets_its_own_answer(server: ServerProcess, version: str) -> None:
    texts = [chr(ord("a") + index) * 3 for index in range(12)]

    def ask(text: str) -> str:
        with httpx.Client(http1=version == "HTTP/1.1", http2=version == "HTTP/2") as client:
            answer = client.post(f"{server.url}/v1/completions", json=body(text), timeout=SOON_S)
        said: str = answer.json()["choices"][0]["text"]
        return said

    with ThreadPoolExecutor(12) as pool:
        for _ in range(3):
            assert list(pool.map(ask, texts)) == [text[0] * 8 for text in texts]
    server.wait_at_rest()


def test_the_queue_is_one_and_an_admin_ends_them_all(server: ServerProcess) -> None:
    """Whichever loop a client comes to: it sees all requests, and its admin reaches them."""
    with ExitStack() as opened:
        clients = [opened.enter_context(httpx.Client(timeout=SOON_S)) for _ in range(12)]
        url = f"{server.url}/v1/completions"
        streams = [
            opened.enter_context(client.stream("POST", url, json=ENDLESS)) for client in clients
        ]
        assert [stream.status_code for stream in streams] == [200] * 12
        for _ in range(8):  # on new connections, so that every loop has some
            assert server.ask("hello").status_code == 503
            assert server.occupancy()["requests"] == 12
        lines = [stream.iter_lines() for stream in streams]
        some_id = next(lines[3]).partition('"id":"')[2].partition('"')[0]
        assert server.post("/abort", {"id": some_id}).json() == {"aborted": 1}
        assert server.post("/abort", {"all": True}).json()["aborted"] in (11, 12)
        for rest in lines:
            assert any('"error"' in line for line in rest)
    server.wait_at_rest()
    assert server.post("/abort", {"all": True}).json() == {"aborted": 0}
    assert server.post("/flush_cache", {}).status_code == 200


@pytest.mark.parametrize("loops", [2, 4])
def test_running_requests_of_every_loop_end_while_the_server_drains(loops: int) -> None:
    with serving(http_loops=loops, drain_timeout_s=SOON_S) as server:
        server.ready()
        with ThreadPoolExecutor(8) as pool:
            asked = [pool.submit(server.ask, "slow", max_tokens=300) for _ in range(8)]
            while server.occupancy()["requests"] < 8:
                assert not any(one.done() for one in asked)
            server.end_clean()
            answers = [one.result() for one in asked]
        assert {answer.json()["usage"]["completion_tokens"] for answer in answers} == {300}


# What they share


def test_loops_that_admit_at_once_stay_within_the_limits() -> None:
    loops, most, rounds = 4, 5, 2000
    counts, admitted = QueueCounts(loops), [0] * loops
    begin = threading.Barrier(loops)
    seen: list[int] = []

    def admit(loop: int) -> None:
        limit = QueueLimit(most, 1000, counts, loop)
        begin.wait(SOON_S)
        for turn in range(rounds):
            try:
                place = limit.admit(1, 1 + turn % 3)
            except Rejected:
                continue
            admitted[loop] = 1 + turn % 3
            seen.append(sum(admitted))
            number, admitted[loop] = admitted[loop], 0
            for _ in range(number):
                place.end()

    threads = [threading.Thread(target=admit, args=(loop,)) for loop in range(loops)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON_S)
        assert not thread.is_alive()
    assert 0 < max(seen) <= most
    assert counts.requests == counts.tokens == [0] * loops


@pytest.mark.parametrize(
    ("connections", "left_first"), [([0], False), ([3, 3], False), ([1, 2], False), ([2, 1], True)]
)
def test_a_loop_with_more_connections_leaves_the_next_to_others(
    connections: list[int], left_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    delays: list[float] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        taken: asyncio.Future[socket.socket] = loop.create_future()
        call_later = loop.call_later

        def told_later(delay_s: float, *called: object) -> asyncio.TimerHandle:
            delays.append(delay_s)
            return call_later(delay_s, *called)  # type: ignore[arg-type]

        with socket.create_server(("127.0.0.1", 0)) as listening:
            listener = Listener(listening.dup(), connections, 0, taken.set_result)
            with socket.create_connection(listening.getsockname()):
                monkeypatch.setattr(loop, "call_later", told_later)
                with await taken:  # nobody else took it
                    listener.close()

    asyncio.run(main())
    assert delays == [0.001] * left_first


def test_a_loop_without_room_for_a_file_waits_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("runtime.listener._PAUSE_S", 0.001)

    class Full:
        """A listening socket whose first connection finds no room."""

        def __init__(self, listening: socket.socket) -> None:
            self.listening, self.refused = listening, False

        def accept(self) -> tuple[socket.socket, object]:
            if not self.refused:
                self.refused = True
                raise OSError(24, "Too many open files")
            return self.listening.accept()

        def __getattr__(self, name: str) -> object:
            return getattr(self.listening, name)

    async def main() -> None:
        taken: asyncio.Future[socket.socket] = asyncio.get_running_loop().create_future()
        with socket.create_server(("127.0.0.1", 0)) as listening:
            full = Full(listening.dup())
            listener = Listener(full, [0], 0, taken.set_result)  # type: ignore[arg-type]
            with socket.create_connection(listening.getsockname()), await taken:
                listener.close()

    asyncio.run(main())
    assert "Too many open files" in caplog.text
