"""What several HTTP loops count, as if one had counted it all.

Each log is another loop's and changes meanwhile: what is read is whole, and as of some moment just
now. Lists and dictionaries are copied whole (library/threadsafety); for deques see copies.py.
"""

import heapq
from collections.abc import Sequence
from operator import attrgetter

from httpd.traces import Trace, Traces
from runtime.request_log import RequestLog


def merged_logs(logs: Sequence[RequestLog]) -> RequestLog:
    """The sum of all; a single one itself. Safe from any thread where there are several."""
    if len(logs) == 1:
        return logs[0]
    merged = RequestLog()
    for log in logs:
        merged.tally.add(log.tally)
    by_age = attrgetter("submitted_s")
    alive = heapq.merge(*([*log.alive.copy().values()] for log in logs), key=by_age)
    merged.alive = {each.id: each for each in alive}
    return merged


def merged_traces(several: Sequence[Traces]) -> Traces:
    """The counts of all, without single traces; a single one itself. Likewise safe."""
    if len(several) == 1:
        return several[0]
    merged = Traces()
    for each in several:
        merged.responses.update(dict(each.responses))
        merged.refusals.update(dict(each.refusals))
    return merged


def youngest_trace(several: Sequence[Traces], either_id: str) -> Trace | None:
    """Of this x-request-id or response id: a client that tries again may come to another loop."""
    found = [trace for each in several if (trace := each.find(either_id)) is not None]
    return max(found, key=attrgetter("received_s"), default=None)
