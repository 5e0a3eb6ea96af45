"""Warnings: when they come, that they say who, and when they go."""

from dataclasses import replace

import pynvml

from engine.core import EngineStats
from runtime.capacity.nvml import Nvml
from runtime.capacity.report import Host
from runtime.capacity.warn import BEHIND_S, THROTTLED_S, Watch
from tests.fakes_nvml import GIB, FakeNvml

HOST = Host(16, 128 * GIB, 100 * GIB)
STATS = EngineStats(
    running=4, waiting=0, free_pages=1, cached_pages=0, evictable_pages=0, total_pages=9,
    page_size=1, steps=0, retractions=0, host_s=0.0,
)  # fmt: skip


class Scene:
    """A watch over a fake machine, whose clock moves on a second at each look."""

    def __init__(self) -> None:
        self.nvml, self.watch, self.now_s = FakeNvml(), Watch(), 0.0
        self.host, self.stats = HOST, STATS
        self._reader = Nvml(self.nvml)

    def look(self, seconds: int = 1) -> list[str]:
        """Codes of what is told after so many seconds."""
        for _ in range(seconds):
            self.now_s += 1
            warnings = self.watch.look(self._reader.read(), self.host, self.stats, self.now_s)
            self.messages = [each.message for each in warnings]
        return [each.code for each in warnings]


def test_all_is_well() -> None:
    assert Scene().look(100) == []


def test_throttling_must_last() -> None:
    scene = Scene()
    scene.nvml.throttle_reasons = 0x4
    assert scene.look(int(THROTTLED_S)) == []
    assert scene.look() == ["throttled"]
    assert scene.messages == ["GPU 0 is slowed down: software power cap."]
    scene.nvml.throttle_reasons = 0x1
    assert scene.look() == []


def test_memory_that_others_take() -> None:
    scene = Scene()
    scene.nvml.processes = [(1, GIB)]
    assert scene.look(3) == [], "it was there before us"
    scene.nvml.processes = [(1, 2 * GIB)]
    assert scene.look() == ["memory_taken"]
    assert "1024 MiB more of GPU 0: 1 (" in scene.messages[0]


def test_memory_errors() -> None:
    scene = Scene()
    scene.nvml.ecc_errors = [5, 1]
    assert scene.look() == [], "they are older than we are"
    scene.nvml.ecc_errors = [6, 3]
    assert scene.look() == ["ecc_uncorrected"]
    assert "had 2 memory errors" in scene.messages[0]
    scene.nvml.ecc_errors = [200, 1]
    assert scene.look() == ["ecc_corrected"]


def test_a_gpu_that_is_lost_and_a_driver_that_goes() -> None:
    scene = Scene()
    scene.look()
    scene.nvml.failures = {"nvmlDeviceGetHandleByIndex": pynvml.NVML_ERROR_GPU_IS_LOST}
    assert scene.look() == ["gpu_lost"] and "GPU is lost" in scene.messages[0]
    scene.nvml.failures = {"nvmlDeviceGetCount": pynvml.NVML_ERROR_DRIVER_NOT_LOADED}
    assert scene.look() == ["gpu_gone"]
    scene.nvml.failures = {}
    assert scene.look() == []


def test_the_machines_memory() -> None:
    scene = Scene()
    scene.host = replace(HOST, memory_available_bytes=GIB)
    assert scene.look() == ["host_memory_low"] and "1024 MiB" in scene.messages[0]


def test_falling_behind() -> None:
    scene = Scene()
    scene.stats = replace(STATS, waiting=5)
    assert scene.look(int(BEHIND_S)) == []
    scene.stats = replace(STATS, waiting=7)
    assert scene.look() == ["falling_behind"] and scene.messages[0].startswith("7 requests wait")
    scene.stats = replace(STATS, waiting=4)
    assert scene.look() == [], "it has become shorter"
    assert scene.look(int(BEHIND_S)) == []
    scene.stats = STATS
    assert scene.look() == []
