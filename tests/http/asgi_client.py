"""A client below HTTP: it decides when body parts arrive, when it leaves and when it reads."""

import asyncio
import json
from typing import Any

from starlette.types import ASGIApp, Message


class AsgiClient:
    """One request to an ASGI app. Owned by the test's loop."""

    def __init__(self, app: ASGIApp, path: str, body: Any = None, **scope: Any) -> None:
        self.sent: list[Message] = []
        self.reading = asyncio.Event()  # cleared: `send` blocks, as behind a full socket
        self.reading.set()
        self.got_message = asyncio.Event()
        self._incoming: asyncio.Queue[Message] = asyncio.Queue()
        self._app = app
        self._scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST",
            "path": path, "raw_path": path.encode(), "query_string": b"", "headers": [],
            "scheme": "http", "root_path": "", "client": ("127.0.0.1", 1), "server": ("h", 1),
            **scope,
        }  # fmt: skip
        if body is not None:
            self.feed(json.dumps(body).encode(), more=False)

    def feed(self, part: bytes, *, more: bool) -> None:
        self._incoming.put_nowait({"type": "http.request", "body": part, "more_body": more})

    def leave(self) -> None:
        self._incoming.put_nowait({"type": "http.disconnect"})

    def start(self) -> "asyncio.Task[None]":
        """The app at work on this request."""
        return asyncio.create_task(self.run())

    async def run(self) -> None:
        await self._app(self._scope, self._incoming.get, self._send)

    async def _send(self, message: Message) -> None:
        await self.reading.wait()
        self.sent.append(message)
        self.got_message.set()

    @property
    def status(self) -> int | None:
        return self.sent[0]["status"] if self.sent else None

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)

    @property
    def complete(self) -> bool:
        return len(self.sent) > 1 and not self.sent[-1].get("more_body", False)
