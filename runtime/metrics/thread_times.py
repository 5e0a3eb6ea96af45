"""How much processor time each of this process' threads has had: which of them is a bottleneck.

One that gets a second of it each second has a core to itself, and no more to give. Linux.
"""

import threading
from collections import Counter
from pathlib import Path
from typing import Final

_TASKS: Final = Path("/proc/self/task")


def thread_seconds(tasks: Path = _TASKS) -> dict[str, float]:
    """Seconds by name, those of a pool's threads together. Safe from any thread.

    Of Python's threads alone; one that ends meanwhile is left out.
    """
    found = Counter[str]()
    for thread in threading.enumerate():
        try:  # schedstat(5): nanoseconds on a processor, nanoseconds of waiting, time slices
            told = (tasks / str(thread.native_id) / "schedstat").read_text()
            found[thread.name.partition("_")[0]] += int(told.split()[0]) / 1e9
        except (OSError, ValueError, IndexError):
            continue
    return dict(found)
