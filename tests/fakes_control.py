"""A `Control` that counts what an admin asked for. Knows no threads."""

from httpd.service import Rejected


class FakeControl:
    """Satisfies httpd.admin.Control. Owned by the test's loop."""

    def __init__(self) -> None:
        self.flushes = 0
        self.aborts = 0
        self.refusal: Rejected | None = None

    async def flush_cache(self) -> int:
        if self.refusal is not None:
            raise self.refusal
        self.flushes += 1
        return 7

    def abort_all(self) -> int:
        self.aborts += 1
        return 3
