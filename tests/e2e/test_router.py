"""Two replicas behind SGLang's router, as deploy/router.sh starts it.

    python3 -m venv ROUTER && ROUTER/bin/pip install sglang-router==0.3.2
    PLAIT_ROUTER=ROUTER/bin ./plait test tests/e2e/test_router.py

The router is in an environment of its own; without that variable these tests are skipped.
"""

import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.server_process import ROOT, SOON_S, START_S, ServerProcess, serving_model

pytestmark = pytest.mark.skipif(
    "PLAIT_ROUTER" not in os.environ, reason="PLAIT_ROUTER does not say where sglang-router is"
)

PAGE = 16
FLAGS = ("--page-size", str(PAGE), "--max-kv-tokens", "65536", "--drain-timeout-s", "90")
NOTICED_S = 20.0  # for the router to see that a replica has gone, or is back
GROUPS = "abcdefgh"


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class Fleet:
    """Two replicas, which a test may end and start anew, and the router before them."""

    def __init__(self, checkpoint: Path, scope: ExitStack) -> None:
        self._checkpoint, self._scope = checkpoint, scope
        self._ports = [free_port(), free_port()]
        self.replicas = [self._start(port) for port in self._ports]
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self.client = openai.OpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=SOON_S
        )

    def _start(self, port: int) -> ServerProcess:
        started = serving_model(self._checkpoint, "--port", str(port), *FLAGS)
        return self._scope.enter_context(started).ready()

    def mend(self) -> None:
        """Starts anew what has ended; back once the router knows."""
        for number, replica in enumerate(self.replicas):
            if replica.process.poll() is not None:
                self.replicas[number] = self._start(self._ports[number])
        wait_until(lambda: self.healthy() == [True, True], NOTICED_S)

    def route(self, log: Path) -> None:
        """Starts the router, which is killed at the end of the scope."""
        environ = {
            **os.environ,
            "PATH": f"{Path(os.environ['PLAIT_ROUTER']).resolve()}:{os.environ['PATH']}",
            "ROUTER_FLAGS": f"--prometheus-port {free_port()}",
        }
        urls = [replica.url for replica in self.replicas]
        router = subprocess.Popen(
            [ROOT / "deploy" / "router.sh", str(self._port), *urls],
            env=environ, stdout=self._scope.enter_context(log.open("w")), stderr=subprocess.STDOUT,
        )  # fmt: skip
        self._scope.callback(router.wait, SOON_S)
        self._scope.callback(router.kill)
        wait_until(lambda: self.healthy() == [True, True], START_S)

    def healthy(self) -> list[bool]:
        """What the router thinks of each replica."""
        try:
            told = httpx.get(f"{self.url}/workers", timeout=SOON_S).json()["workers"]
        except httpx.ConnectError:
            return []
        known = {worker["url"]: worker["is_healthy"] for worker in told}
        return [known.get(f"http://127.0.0.1:{port}", False) for port in self._ports]

    def finished(self, number: int) -> int:
        """Requests that this replica has answered."""
        text = self.replicas[number].get("/metrics").text
        counts = re.findall(r"^plait_requests_finished_total\{.*\} (\S+)$", text, re.MULTILINE)
        return sum(int(float(count)) for count in counts)

    def ask(self, prompt: str, tokens: int = 4) -> dict[str, Any]:
        """An answer's usage. By httpx: openai's models are not made by several threads at once."""
        asked = {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
        response = httpx.post(f"{self.url}/v1/completions", json=asked, timeout=SOON_S)
        assert response.status_code == 200, response.text
        usage = response.json()["usage"]
        assert isinstance(usage, dict) and usage["completion_tokens"] == tokens
        return usage

    def ask_together(self, prompts: Sequence[str]) -> None:
        """Long answers at a time, so that it is load that divides them."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            list(pool.map(lambda prompt: self.ask(prompt, 200), prompts))

    def stream(self, prompt: str, tokens: int) -> openai.Stream[openai.types.Completion]:
        return self.client.completions.create(
            model="tiny", prompt=prompt, max_tokens=tokens, temperature=0, stream=True,
            stream_options={"include_usage": True}, extra_body={"ignore_eos": True},
        )  # fmt: skip

    def serving(self) -> int:
        """Which replica computes, where exactly one does."""
        running = [replica.occupancy()["running"] for replica in self.replicas]
        assert sorted(running) == [0, 1], running
        return running.index(1)


def wait_until(condition: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture(scope="module")
def started(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with ExitStack() as scope:
        made = Fleet(checkpoint, scope)
        made.route(tmp_path_factory.mktemp("router") / "log")
        yield made


@pytest.fixture
def fleet(started: Fleet) -> Fleet:
    """Whole, whatever the test before has left of it."""
    started.mend()
    return started


def test_clients_see_one_server(fleet: Fleet) -> None:
    assert [model.id for model in fleet.client.models.list()] == ["tiny"]
    for _ in range(20):  # whoever errs so often closes no replica to others
        with pytest.raises(openai.NotFoundError) as caught:
            fleet.client.completions.create(model="another", prompt="x")
        assert caught.value.code == "model_not_found"
    fleet.ask("x")


def test_prompts_that_begin_alike_go_to_one_replica(fleet: Fleet) -> None:
    beginnings = [group * 20 * PAGE for group in GROUPS]
    before = [fleet.finished(number) for number in (0, 1)]
    fleet.ask_together(beginnings)
    shares = [fleet.finished(number) - before[number] for number in (0, 1)]
    assert sum(shares) == len(GROUPS) and min(shares) >= 2, shares
    for turn in range(3):
        for beginning in beginnings:
            usage = fleet.ask(f"{beginning} and question {turn}")
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            assert cached >= 20 * PAGE, (beginning[0], turn, cached)
    asked = [fleet.finished(number) - before[number] for number in (0, 1)]
    assert asked == [4 * share for share in shares]  # whoever had a beginning got what followed it


def test_a_stream_comes_as_it_is_made(fleet: Fleet) -> None:
    prompt, tokens = "stream this", 300
    texts = []
    with fleet.stream(prompt, tokens) as stream:
        for number, event in enumerate(stream):
            if number == 0:
                fleet.serving()  # the first event is here while a replica is at the others
            texts += [choice.text for choice in event.choices]
            usage = event.usage
    assert usage is not None and usage.completion_tokens == tokens
    direct = fleet.replicas[0].post(
        "/v1/completions",
        {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "temperature": 0,
         "ignore_eos": True},
    )  # fmt: skip
    assert "".join(texts) == direct.json()["choices"][0]["text"]


def test_a_client_that_leaves_is_let_go(fleet: Fleet) -> None:
    with fleet.stream("leave", 3000) as stream:
        next(iter(stream))
        replica = fleet.replicas[fleet.serving()]
    replica.wait_at_rest(SOON_S)


def test_a_replica_that_drains_ends_its_answers_and_gets_no_more(fleet: Fleet) -> None:
    with fleet.stream("drain", 600) as stream:
        events = iter(stream)
        next(events)
        leaving = fleet.serving()
        fleet.replicas[leaving].process.send_signal(signal.SIGTERM)
        for turn in range(10):  # at once, before the router can know
            fleet.ask(f"{turn} while it drains")
        last = list(events)[-1]
    assert last.usage is not None and last.usage.completion_tokens == 600
    assert fleet.replicas[leaving].wait_exit() == 0
    wait_until(lambda: not fleet.healthy()[leaving], NOTICED_S)
    fleet.mend()


def test_a_killed_replica_is_gone_around_and_found_again(fleet: Fleet) -> None:
    with fleet.stream("killed", 3000) as stream, ThreadPoolExecutor(1) as pool:
        events = iter(stream)
        next(events)
        killed = fleet.serving()
        whole = pool.submit(fleet.ask, "killed", 500)  # alike: it goes there, too
        wait_until(lambda: fleet.replicas[killed].occupancy()["running"] == 2, SOON_S)
        fleet.replicas[killed].process.kill()
        with pytest.raises(Exception, match="peer closed connection"):  # not as if it were whole
            list(events)
        whole.result(SOON_S)  # by the other one, from its start
        fleet.ask("killed")
    for turn in range(10):
        fleet.ask(f"{turn} while one is gone")
    wait_until(lambda: not fleet.healthy()[killed], NOTICED_S)
    fleet.mend()
    fleet.ask_together([f"{group} is back" for group in GROUPS])
    assert fleet.finished(killed) >= 2
