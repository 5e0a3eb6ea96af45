"""When requests came to the engine, got their row, and had their first token.

Times are `time.monotonic()`, given by the caller. A request that is retracted keeps the times of
its first start: what it loses is part of its prefill or of its decoding, as its client sees it.
"""

from dataclasses import replace

from engine.request import Started, StepOutput


class RequestTimes:
    """Times of requests that have no token yet. Owned by the engine thread."""

    def __init__(self) -> None:
        self._queued_s: dict[int, float] = {}
        self._begun_s: dict[int, float] = {}

    def __len__(self) -> int:
        """Requests without a token."""
        return len(self._queued_s)

    def queue(self, request_id: int, now_s: float) -> None:
        self._queued_s[request_id] = now_s

    def begin(self, request_id: int, now_s: float) -> None:
        """It has a row; called once for each row it gets."""
        if request_id in self._queued_s:
            self._begun_s.setdefault(request_id, now_s)

    def begun(self) -> tuple[int, ...]:
        """Ids of those that have a row, or had one: their prompts are being computed."""
        return tuple(self._begun_s)

    def stamped(self, output: StepOutput) -> StepOutput:
        """The output with the times of the requests that it starts."""
        if not self._queued_s:
            return output  # nobody starts or ends without a token: most steps
        started = tuple(self._with_times(each, output.made_s) for each in output.started)
        for request_id in output.request_ids[output.token_ids < 0].tolist():
            self._forget(request_id)  # it ended without a token
        return replace(output, started=started)

    def _with_times(self, started: Started, now_s: float) -> Started:
        queued_s, begun_s = self._forget(started.request.id)
        queued_s = now_s if queued_s is None else queued_s
        return replace(
            started, queued_s=queued_s, begun_s=queued_s if begun_s is None else begun_s
        )  # fmt: skip

    def _forget(self, request_id: int) -> tuple[float | None, float | None]:
        return self._queued_s.pop(request_id, None), self._begun_s.pop(request_id, None)
