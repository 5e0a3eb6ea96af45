"""A `Control` that counts what an admin asked for. Knows no threads."""

from typing import Any

from httpd.running import Running
from httpd.service import Rejected


class FakeControl:
    """Satisfies httpd.admin.Control. Owned by the test's loop."""

    def __init__(self) -> None:
        self.running = Running()
        self.flushes = 0
        self.aborts = 0
        self.reads: list[int] = []
        self.refusal: Rejected | None = None

    async def flush_cache(self) -> int:
        if self.refusal is not None:
            raise self.refusal
        self.flushes += 1
        return 7

    async def read_steps(self, count: int) -> bytes:
        if self.refusal is not None:
            raise self.refusal
        self.reads.append(count)
        return b'{"step": 1}\n'

    async def outline_cache(self) -> dict[str, Any]:
        if self.refusal is not None:
            raise self.refusal
        edge = {"locks": 1, "uses": 3, "hidden": 0}
        return {
            "page_size": 16, "cached_tokens": 96, "locked_tokens": 96, "total_nodes": 2,
            "nodes": [
                {"parent": -1, "tokens": 64, **edge}, {"parent": 0, "tokens": 32, **edge},
            ],
        }  # fmt: skip

    async def abort(self, response_id: str | None) -> int:
        if response_id is not None:
            return int(self.running.try_end(response_id))
        self.aborts += 1
        return 3

    def stacks(self) -> str:
        return "Thread engine:\n  in its place\n"
