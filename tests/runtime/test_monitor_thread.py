"""The monitor thread: it reports once, then samples; nobody waits for a driver that hangs."""

import threading
from dataclasses import replace

from engine.core import EngineStats
from runtime.capacity.gpu import Gpus
from runtime.capacity.nvml import Nvml
from runtime.capacity.report import Capacity
from runtime.inbox import Wakeup
from runtime.latest import Latest
from runtime.lifecycle import Lifecycle
from runtime.live import WINDOW_S
from runtime.monitor_thread import MonitorLoop, MonitorRings, Sample
from runtime.worker import Worker
from tests.fakes_nvml import FakeNvml
from tests.runtime.test_warn import STATS


class Monitored:
    """A monitor thread over a fake NVML, each of whose readings a test lets through."""

    def __init__(self) -> None:
        self.lifecycle, wakeup = Lifecycle(), Wakeup()
        self.lifecycle.subscribe(wakeup)
        self.rings = MonitorRings(
            wakeup, Latest[EngineStats](), Latest[Capacity](), Latest[Sample]()
        )  # fmt: skip
        self.fake, self.reports = FakeNvml(), []  # type: ignore[var-annotated]
        self.asked, self.answer = threading.Semaphore(0), threading.Semaphore(0)
        loop = MonitorLoop(self.rings, None, self.reports.append, lambda: Slow(self))
        self.worker = Worker("monitor", loop.run, self.lifecycle)
        self.worker.start()

    def let(self, readings: int = 1) -> None:
        for _ in range(readings):
            self.answer.release()
        for _ in range(readings):
            assert self.asked.acquire(timeout=20)

    def close(self) -> None:
        self.lifecycle.stop()
        self.answer.release(100)
        assert self.worker.join(10)
        self.rings.wakeup.close()
        assert self.lifecycle.failure is None


class Slow(Nvml):
    """Waits before each reading until the test lets it through. Owned by the monitor thread."""

    def __init__(self, owner: Monitored) -> None:
        super().__init__(owner.fake)
        self._owner = owner

    def read(self) -> Gpus:
        assert self._owner.answer.acquire(timeout=20)
        self._owner.asked.release()
        return super().read()


def test_it_reports_and_then_samples() -> None:
    monitored = Monitored()
    monitored.rings.stats.value = STATS
    monitored.let(2)  # the report's, and the first sample's
    monitored.rings.wakeup.signal()
    monitored.let()
    sample = monitored.rings.sample.value
    assert sample is not None and sample.gpus.gpus[0].name == "NVIDIA H200"
    assert sample.before is not None and sample.before[1] is STATS
    (report,) = monitored.reports
    assert report is monitored.rings.capacity.value and report.devices.gpus
    monitored.close()
    assert not monitored.fake.is_open, "NVML was given back"


def test_a_driver_that_hangs_is_no_hang_of_the_server() -> None:
    monitored = Monitored()
    monitored.let()
    assert monitored.worker.silent_s(1e12) == 0, "nobody watches this thread"
    assert monitored.rings.sample.value is None
    monitored.close()


def test_what_the_engine_told_is_kept_for_a_window() -> None:
    rings = MonitorRings(Wakeup(), Latest(), Latest(), Latest())
    loop = MonitorLoop(rings, None, lambda _: None, lambda: Nvml(FakeNvml()))
    gpus = Gpus((), None, None, "none")
    samples = []
    for step in range(30):
        rings.stats.value = replace(STATS, steps=step)
        samples.append(loop._sample(gpus, now_s=float(step)))
    before = samples[-1].before
    assert before is not None
    assert before[0] == 29 - WINDOW_S and before[1].steps == 29 - int(WINDOW_S)
    rings.wakeup.close()
