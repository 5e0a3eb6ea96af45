"""A job on another thread, whose place is taken until it ends: also where its client has left."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


async def run_to_the_end(job: Callable[[], Result], on_end: Callable[[], None]) -> Result:
    """What `job` gives; raises what it raises.

    on_end  called on the loop once the thread is free again, though the caller was cancelled
    """

    def end(ended: "asyncio.Future[Result]") -> None:
        on_end()
        if not ended.cancelled():
            ended.exception()  # seen, though its client may have left

    running = asyncio.ensure_future(asyncio.to_thread(job))
    running.add_done_callback(end)
    return await asyncio.shield(running)
