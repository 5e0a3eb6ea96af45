"""What several tests of the runtime stand on."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    """The other ranks' threads, which have ended behind a test."""
    before = threading.active_count()
    with ThreadPoolExecutor(3) as threads:
        yield threads
    assert threading.active_count() == before
