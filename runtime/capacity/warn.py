"""What will cost speed or requests, told while it lasts and logged when it begins and ends.

Each warning has a code that stays the same, for programs. Looks at what the monitor samples once a
second; a sign must last for a while before it counts, so that one busy second warns of nothing.
"""

import logging
import time
from collections.abc import Iterator
from typing import Final

from engine.core import EngineStats
from runtime.capacity.gpu import Gpu, GpuProcess, Gpus
from runtime.capacity.report import Host
from runtime.live import Warned

log = logging.getLogger(__name__)

CODES: Final = (
    "throttled", "memory_taken", "ecc_uncorrected", "ecc_corrected", "gpu_lost", "gpu_gone",
    "host_memory_low", "falling_behind",
)  # fmt: skip
THROTTLED_S: Final = 5.0  # so long must a GPU be slowed down
BEHIND_S: Final = 30.0  # so long must the queue grow
LOW_SHARE: Final = 0.05  # of the host's memory
GREW_BYTES: Final = 256 << 20  # of other programs on the GPU, since the first sample
CORRECTED: Final = 100  # ECC errors since the first sample


class Watch:
    """Signs and since when they are seen. Owned by the monitor thread."""

    def __init__(self) -> None:
        self._first: dict[int, Gpu] = {}  # each GPU as it was first seen
        self._seen_s: dict[str, float] = {}  # key of a sign → since when, monotonic
        self._warned: dict[str, Warned] = {}  # key → what is told
        self._waiting: int | None = None  # requests that waited when the queue was last shorter

    def look(
        self, gpus: Gpus, host: Host, stats: EngineStats | None, now_s: float
    ) -> tuple[Warned, ...]:
        """What is wrong now, the oldest first."""
        signs = {key: (text, last) for key, text, last in self._signs(gpus, host, stats)}
        for key in [key for key in self._seen_s if key not in signs]:
            del self._seen_s[key]
            ended = self._warned.pop(key, None)
            if ended is not None:
                log.info("no longer: %s", ended.message)
        for key, (message, after_s) in signs.items():
            since_s = self._seen_s.setdefault(key, now_s)
            if now_s - since_s < after_s:
                continue
            before = self._warned.get(key)
            if before is None:
                log.warning("%s", message)
            code = key.partition(" ")[0]
            assert code in CODES
            at_s = time.time() if before is None else before.since_s
            self._warned[key] = Warned(code, message, at_s)
        return tuple(self._warned.values())

    def _signs(
        self, gpus: Gpus, host: Host, stats: EngineStats | None
    ) -> Iterator[tuple[str, str, float]]:
        """(key, message, seconds it must last): the key begins with the warning's code."""
        for gpu in gpus.gpus:
            yield from self._of_gpu(gpu)
        if self._first and gpus.absent is not None:
            yield "gpu_gone", f"The GPUs are not seen any more: {gpus.absent}.", 0.0
        total, available = host.memory_total_bytes, host.memory_available_bytes
        if total and available is not None and available < LOW_SHARE * total:
            yield "host_memory_low", f"{available >> 20} MiB of memory are left on this machine.", 0
        if stats is not None:
            yield from self._of_queue(stats)

    def _of_gpu(self, gpu: Gpu) -> Iterator[tuple[str, str, float]]:
        number = gpu.index
        if gpu.activity.memory is None:
            if number in self._first:
                why = gpu.faults[0].why if gpu.faults else "the driver does not say why"
                yield f"gpu_lost {number}", f"GPU {number} does not answer: {why}.", 0.0
            return
        first = self._first.setdefault(number, gpu)
        reasons = gpu.activity.throttled_by
        if reasons:
            message = f"GPU {number} is slowed down: {', '.join(reasons)}."
            yield f"throttled {number}", message, THROTTLED_S
        grown = _others_bytes(gpu) - _others_bytes(first)
        if grown >= GREW_BYTES:
            names = ", ".join(f"{each.pid} ({each.name or '?'})" for each in _others(gpu))
            message = f"Other programs have taken {grown >> 20} MiB more of GPU {number}: {names}."
            yield f"memory_taken {number}", message, 0.0
        ecc, then = gpu.activity.ecc, first.activity.ecc
        if ecc is not None and then is not None:
            lost = (ecc.uncorrected or 0) - (then.uncorrected or 0)
            if lost > 0:
                message = f"GPU {number} had {lost} memory errors that could not be corrected."
                yield f"ecc_uncorrected {number}", message, 0.0
            mended = (ecc.corrected or 0) - (then.corrected or 0)
            if mended >= CORRECTED:
                message = f"GPU {number} has corrected {mended} memory errors since the start."
                yield f"ecc_corrected {number}", message, 0.0

    def _of_queue(self, stats: EngineStats) -> Iterator[tuple[str, str, float]]:
        """Falling behind: some wait, and for BEHIND_S never fewer than when that began."""
        if not stats.waiting or (self._waiting is not None and stats.waiting < self._waiting):
            self._waiting = None
            return
        if self._waiting is None:
            self._waiting = stats.waiting
        message = f"{stats.waiting} requests wait, and the queue does not get shorter."
        yield "falling_behind", message, BEHIND_S


def _others(gpu: Gpu) -> list[GpuProcess]:
    return [each for each in gpu.processes or () if not each.is_ours]


def _others_bytes(gpu: Gpu) -> int:
    return sum(each.used_bytes or 0 for each in _others(gpu))
