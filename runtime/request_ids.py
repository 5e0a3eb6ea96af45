"""Ids of requests: each HTTP loop gives its own, and an id tells whose it is.

Knows nothing of what the ids are of.
"""

import itertools
from collections.abc import Iterator


def request_ids(loop: int, loops: int) -> Iterator[int]:
    """The ids that one of `loops` gives, each once; none is 0."""
    return itertools.count(loops + loop, loops)


def loop_of(request_id: int, loops: int) -> int:
    """Which of `loops` gave this id."""
    return request_id % loops
