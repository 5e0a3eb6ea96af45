"""GPUs through NVML: what is told, and that no error of it ever gets out."""

import os

import pynvml
import pytest

from runtime.capacity.gpu import GpuMemory, Mig, NvLinks
from runtime.capacity.nvml import Nvml
from runtime.capacity.peaks import peak_of
from tests.fakes_nvml import ERRORS, GIB, FakeNvml


def test_what_an_h200_tells() -> None:
    fake = FakeNvml()
    fake.processes = [(os.getpid(), 5 * GIB), (2**30, None), (1, GIB)]
    told = Nvml(fake).read()
    assert (told.driver, told.cuda, told.absent) == ("580.1", "13.2", None)
    (gpu,) = told.gpus
    assert (gpu.index, gpu.name, gpu.uuid) == (0, "NVIDIA H200", "GPU-0")
    assert gpu.activity.memory == GpuMemory(140 * GIB, 10 * GIB, 130 * GIB, GIB)
    assert (gpu.activity.power_w, gpu.activity.power_limit_w) == (512.5, 700.0)
    assert (gpu.activity.sm_mhz, gpu.activity.memory_mhz) == (1980, 3201)
    assert gpu.activity.busy_share == 0.97 and gpu.activity.throttled_by == ()
    assert gpu.nvlink == NvLinks(active=3, present=4)
    assert gpu.mig == Mig(False, ()) and gpu.faults == ()
    assert gpu.peak.bytes_per_s == 4.8e12
    ours, other, unseen = gpu.processes or ()
    assert ours.is_ours and ours.used_bytes == 5 * GIB and ours.name
    assert other.pid == 1 and not other.is_ours
    assert (unseen.pid, unseen.name, unseen.user, unseen.used_bytes) == (2**30, None, None, None)


def test_what_slows_it_down_is_named_and_idling_is_not() -> None:
    fake = FakeNvml()
    fake.throttle_reasons = 0x1 | 0x4 | 0x40
    (gpu,) = Nvml(fake).read().gpus
    assert gpu.activity.throttled_by == ("software power cap", "hardware thermal slowdown")


def test_mig_instances() -> None:
    fake = FakeNvml()
    fake.mig = True
    (gpu,) = Nvml(fake).read().gpus
    assert gpu.mig is not None and gpu.mig.enabled
    assert [each.total_bytes for each in gpu.mig.instances] == [20 * GIB, 20 * GIB]
    assert gpu.faults == (), "a free place is no fault"


@pytest.mark.parametrize("question", FakeNvml().questions)
def test_every_question_may_fail_in_every_way(question: str) -> None:
    for error in ERRORS:
        fake = FakeNvml(gpus=2)
        fake.processes = [(1, GIB)]
        fake.failures = {question: error}
        nvml = Nvml(fake)
        told = nvml.read()
        nvml.close()
        if question in ("nvmlInit", "nvmlDeviceGetCount"):
            assert told.gpus == () and told.absent
            continue
        assert len(told.gpus) == 2 and told.absent is None
        if error == pynvml.NVML_ERROR_NOT_SUPPORTED:
            assert all(not gpu.faults for gpu in told.gpus), "what a GPU has not is no fault"
        elif question == "nvmlDeviceGetNvLinkState" and error == pynvml.NVML_ERROR_INVALID_ARGUMENT:
            assert all(gpu.nvlink is None for gpu in told.gpus)
        elif question.startswith("nvmlDevice") and question in fake.calls:
            words = str(pynvml.NVMLError(error))
            assert all(words in {fault.why for fault in gpu.faults} for gpu in told.gpus)


def test_everything_may_fail_at_once() -> None:
    """As when a GPU falls off the bus: it has an index, and nothing else."""
    fake = FakeNvml()
    fake.failures = {
        name: pynvml.NVML_ERROR_GPU_IS_LOST for name in fake.questions if "DeviceGet" in name
    }
    del fake.failures["nvmlDeviceGetCount"]
    (gpu,) = Nvml(fake).read().gpus
    assert gpu.activity.memory is None and gpu.processes is None
    assert {fault.why for fault in gpu.faults} == {"GPU is lost"}
    del fake.failures["nvmlDeviceGetHandleByIndex"]
    (gpu,) = Nvml(fake).read().gpus
    assert gpu.name is None and len(gpu.faults) > 10


def test_an_older_driver_tells_memory_without_what_is_reserved() -> None:
    class Older(FakeNvml):
        def _memory(self, gpu: object, version: int | None = None) -> object:  # type: ignore[override]
            if version is not None:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
            return super()._memory(gpu)

    (gpu,) = Nvml(Older()).read().gpus
    assert gpu.activity.memory == GpuMemory(140 * GIB, 10 * GIB, 130 * GIB, None)


def test_a_driver_that_goes_and_comes_back() -> None:
    fake = FakeNvml()
    nvml = Nvml(fake)
    assert nvml.read().gpus
    fake.failures = {"nvmlDeviceGetCount": pynvml.NVML_ERROR_DRIVER_NOT_LOADED}
    assert "Driver Not Loaded" in (nvml.read().absent or "")
    assert not fake.is_open
    fake.failures = {"nvmlInit": pynvml.NVML_ERROR_DRIVER_NOT_LOADED}
    assert "Driver Not Loaded" in (nvml.read().absent or "")
    fake.failures = {}
    assert nvml.read().gpus and fake.is_open
    nvml.close()
    assert not fake.is_open


def test_no_gpu_is_told_as_such() -> None:
    assert Nvml(FakeNvml(gpus=0)).read().absent == "the driver sees no GPU"


@pytest.mark.parametrize(
    ("name", "bandwidth"),
    [
        ("NVIDIA H200", 4.8e12),
        ("NVIDIA H200 NVL", 4.8e12),
        ("NVIDIA H100 80GB HBM3", 3.35e12),
        ("NVIDIA L4", 0.3e12),
        ("NVIDIA L40S", 0.864e12),
    ],
)
def test_peaks_by_name(name: str, bandwidth: float) -> None:
    assert peak_of(name, None, None).bytes_per_s == bandwidth


def test_peaks_of_the_unknown() -> None:
    derived = peak_of("NVIDIA X1", 6144, 3201)  # an H200's bus: 4.9 TB/s
    assert derived.bytes_per_s == pytest.approx(4.9e12, rel=0.01) and derived.bf16_flops is None
    assert peak_of("NVIDIA X1", None, 3201).bytes_per_s is None
    assert peak_of(None, None, None).source == "unknown"
