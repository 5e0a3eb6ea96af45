"""Processor time by thread."""

import threading
import time
from pathlib import Path

from runtime.metrics.thread_times import thread_seconds


def test_a_thread_that_works_has_had_time() -> None:
    worked, go_home = threading.Event(), threading.Event()

    def work() -> None:
        end_s = time.thread_time() + 0.05
        while time.thread_time() < end_s:
            pass
        worked.set()
        go_home.wait(20)

    threads = [threading.Thread(target=work, name=f"pool_{index}") for index in range(2)]
    for thread in threads:
        thread.start()
        assert worked.wait(20)
        worked.clear()
    told = thread_seconds()
    go_home.set()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert 0.09 <= told["pool"] < 5 and "MainThread" in told
    assert "pool" not in thread_seconds()


def test_where_the_kernel_tells_nothing(tmp_path: Path) -> None:
    assert thread_seconds(str(tmp_path)) == {}
