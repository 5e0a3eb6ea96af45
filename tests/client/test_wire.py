"""Answers as they come in, whoever may have stopped waiting for them."""

import asyncio

import httpx
import pytest

from client.wire import Answer, Head


def test_a_head_that_comes_as_its_request_is_cancelled_is_no_error() -> None:
    """The loop may read from the socket between a cancellation and its delivery."""

    async def main() -> None:
        answer = Answer(lambda: None)
        asking = asyncio.create_task(answer.response("HTTP/1.1"))
        await asyncio.sleep(0)  # it waits for the head
        asking.cancel()
        answer.begin(Head(200, []))
        answer.put(b"part")
        answer.fail(httpx.ReadError("the connection is closed"))
        with pytest.raises(asyncio.CancelledError):
            await asking
        with pytest.raises(httpx.ReadError):
            assert [part async for part in answer] == [b"part"]

    asyncio.run(main())
