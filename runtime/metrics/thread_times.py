"""How much processor time each of this process' threads has had: which of them is a bottleneck.

One that gets a second of it each second has a core to itself, and no more to give. Linux.
"""

import threading
from collections import defaultdict
from typing import Final

_TASKS: Final = "/proc/self/task"


def thread_seconds(tasks: str = _TASKS) -> dict[str, float]:
    """Seconds by name, those of a pool's threads together. Safe from any thread.

    Of Python's threads alone; one that ends meanwhile is left out.
    """
    found = defaultdict[str, float](float)
    for thread in threading.enumerate():
        try:
            # Bytes and no buffer: in a scrape, a text file for each thread would cost milliseconds.
            with open(f"{tasks}/{thread.native_id}/schedstat", "rb", buffering=0) as file:
                told = file.read(64)  # ns on a processor, ns of waiting for one, time slices
            found[thread.name.partition("_")[0]] += int(told.split()[0]) / 1e9
        except (OSError, ValueError, IndexError):
            continue
    return dict(found)
