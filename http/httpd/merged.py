"""Several generations as one flow, each delta with its generation's index."""

import asyncio
from collections.abc import AsyncIterator, Sequence

from engine.request import Delta
from httpd.service import Generation


async def merged(generations: Sequence[Generation]) -> AsyncIterator[tuple[int, Delta]]:
    """What they bring, in each one's order, until all have ended.

    A generation that is aborted meanwhile brings nothing more, and is not waited for. Raises what
    one of them raises.
    """
    if len(generations) == 1:
        async for delta in generations[0]:
            yield 0, delta
        return
    flows = [aiter(generation) for generation in generations]
    waiting = {asyncio.ensure_future(anext(flow)): index for index, flow in enumerate(flows)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index = waiting.pop(task)
                try:
                    delta = task.result()
                except StopAsyncIteration:
                    continue
                yield index, delta
                waiting[asyncio.ensure_future(anext(flows[index]))] = index
    finally:
        for task in waiting:
            task.cancel()
