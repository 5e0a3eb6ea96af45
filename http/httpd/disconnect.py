"""Ends work for a client that has gone.

Rules
- After a disconnect an ASGI server drops what is sent without a word, so the only sign is the
  `http.disconnect` message; somebody must be receiving while the answer is made.
- Work that is cancelled here must give back what it holds in a `finally`.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any

from starlette.types import Receive


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Runs `work`, and cancels it as soon as the client goes.

    The request body must have been read. Raises what `work` raises; returns normally where the
    client went.
    """
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_wait_disconnect(receive))
    watching.add_done_callback(lambda _: working.cancel())
    try:
        await working
    except asyncio.CancelledError:
        current = asyncio.current_task()
        if current is not None and current.cancelling():
            raise  # the server is stopping: it was this task that was cancelled
    finally:
        watching.cancel()


async def _wait_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
