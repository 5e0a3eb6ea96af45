"""A hundred streams at the same time on one HTTP/2 connection."""

import asyncio
import json
from typing import Any

import httpx

from tests.server_process import SOON_S, ServerProcess

STREAMS = 100


def asked(index: int, **more: Any) -> dict[str, Any]:
    return {
        "model": "tiny",
        "prompt": f"stream {index}",
        "max_tokens": 40,
        "temperature": 0,
        **more,
    }


async def read(client: httpx.AsyncClient, index: int, begun: asyncio.Barrier) -> str:
    """The text; read on only once every stream has begun."""
    text = ""
    body = asked(index, stream=True)
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert (response.status_code, response.http_version) == (200, "HTTP/2")
        await begun.wait()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
    return text


def test_a_hundred_streams_on_one_connection(tiny: ServerProcess) -> None:
    async def main() -> list[str]:
        client = httpx.AsyncClient(
            base_url=tiny.url, http1=False, http2=True, timeout=SOON_S,
            limits=httpx.Limits(max_connections=1),
        )  # fmt: skip
        begun = asyncio.Barrier(STREAMS)
        async with client:
            return await asyncio.gather(*(read(client, n, begun) for n in range(STREAMS)))

    texts = asyncio.run(asyncio.wait_for(main(), 60))
    for index in range(0, STREAMS, 9):
        alone = tiny.post("/v1/completions", asked(index)).json()["choices"][0]["text"]
        assert texts[index] == alone
    assert len(set(texts)) == STREAMS
    tiny.wait_at_rest()
