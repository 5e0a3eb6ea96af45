"""Encoding and decoding beside the rings: what a service answers, and how many jobs it takes."""

import asyncio
import threading

import pytest

from engine.errors import PromptError
from engine.request import TextPrompt, TokenPrompt
from httpd.service import Rejected
from runtime.text_jobs import MAX_JOBS, TextJobs
from tests.runtime.test_service import Bench, scenario


@scenario
async def test_text_to_ids_and_back(bench: Bench) -> None:
    assert await bench.service.tokenize(TextPrompt("hi")) == (104, 105)
    assert await bench.service.tokenize(TokenPrompt((1, 2))) == (1, 2)
    assert await bench.service.detokenize((104, 105)) == "hi"
    assert await bench.service.token_texts((104,)) == ["<0x68>"]


@scenario
async def test_refusals(bench: Bench) -> None:
    with pytest.raises(Rejected, match="this prompt is refused") as refused:
        await bench.service.tokenize(TextPrompt("refuse"))
    assert (refused.value.status, refused.value.param) == (400, "prompt")
    with pytest.raises(Rejected, match="failed to encode") as failed:
        await bench.service.tokenize(TextPrompt("panic"))
    assert failed.value.status == 500


def test_jobs_are_bounded() -> None:
    async def main() -> None:
        jobs, gate = TextJobs(), threading.Event()
        running = [asyncio.create_task(jobs.run(gate.wait)) for _ in range(MAX_JOBS)]
        await asyncio.sleep(0)
        with pytest.raises(Rejected) as refused:
            await jobs.run(len, "x")
        assert (refused.value.status, refused.value.code) == (503, "busy")
        gate.set()
        assert all(await asyncio.gather(*running))
        assert await jobs.run(len, "x") == 1
        with pytest.raises(PromptError):
            await jobs.run(_refuse)

    asyncio.run(main())


def test_a_client_that_leaves_frees_no_place() -> None:
    """Its thread works on, and keeps the text."""
    gate = threading.Event()

    async def main() -> None:
        jobs = TextJobs()
        asked = [asyncio.ensure_future(jobs.run(gate.wait)) for _ in range(MAX_JOBS)]
        await asyncio.sleep(0)
        for one in asked:
            one.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        with pytest.raises(Rejected) as refusal:
            await jobs.run(len, "x")
        assert refusal.value.status == 503
        gate.set()
        while True:
            try:
                assert await jobs.run(len, "xyz") == 3
                return
            except Rejected:
                await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(main(), 10))


def _refuse() -> None:
    raise PromptError("no", "prompt")
