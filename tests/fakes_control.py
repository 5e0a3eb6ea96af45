"""A `Control` that counts what an admin asked for. Knows no threads."""

from httpd.service import Rejected


class FakeControl:
    """Satisfies httpd.admin.Control. Owned by the test's loop."""

    def __init__(self) -> None:
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

    def abort_all(self) -> int:
        self.aborts += 1
        return 3

    def stacks(self) -> str:
        return "Thread engine:\n  in its place\n"
