"""NVML as a fake: H200s that answer, and any question made to fail with any error."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pynvml

GIB = 1 << 30


class FakeNvml:
    """Has pynvml's functions, errors and constants. Owned by the test's thread.

    gpus       how many there are
    failures   name of a function → code of the error that it raises
    processes  (pid, bytes) of those that compute on every GPU
    """

    def __init__(self, gpus: int = 1) -> None:
        self.gpus = gpus
        self.failures: dict[str, int] = {}
        self.processes: list[tuple[int, int | None]] = []
        self.throttle_reasons = 0x1  # idle
        self.mig = False
        self.name = "NVIDIA H200"
        self.used = 10 * GIB
        self.ecc_errors = [0, 0]
        self.calls: list[str] = []
        self.is_open = False
        self._answers: dict[str, Callable[..., Any]] = {
            "nvmlInit": self._init,
            "nvmlShutdown": self._shutdown,
            "nvmlSystemGetDriverVersion": lambda: "580.1",
            "nvmlSystemGetCudaDriverVersion_v2": lambda: 13020,
            "nvmlDeviceGetCount": lambda: self.gpus,
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetName": lambda _gpu: self.name,
            "nvmlDeviceGetUUID": lambda gpu: f"GPU-{gpu}",
            "nvmlDeviceGetCudaComputeCapability": lambda _gpu: (9, 0),
            "nvmlDeviceGetMemoryInfo": self._memory,
            "nvmlDeviceGetClockInfo": lambda _gpu, kind: {1: 1980, 2: 3201}[kind],
            "nvmlDeviceGetMaxClockInfo": lambda _gpu, kind: {1: 1980, 2: 3201}[kind],
            "nvmlDeviceGetMemoryBusWidth": lambda _gpu: 6144,
            "nvmlDeviceGetPowerUsage": lambda _gpu: 512_500,
            "nvmlDeviceGetEnforcedPowerLimit": lambda _gpu: 700_000,
            "nvmlDeviceGetTemperature": lambda _gpu, _sensor: 61,
            "nvmlDeviceGetUtilizationRates": lambda _gpu: SimpleNamespace(gpu=97, memory=50),
            "nvmlDeviceGetCurrentClocksThrottleReasons": lambda _gpu: self.throttle_reasons,
            "nvmlDeviceGetEccMode": lambda _gpu: [1, 1],
            "nvmlDeviceGetTotalEccErrors": lambda _gpu, kind, _counter: self.ecc_errors[kind],
            "nvmlDeviceGetCurrPcieLinkGeneration": lambda _gpu: 5,
            "nvmlDeviceGetCurrPcieLinkWidth": lambda _gpu: 16,
            "nvmlDeviceGetMaxPcieLinkGeneration": lambda _gpu: 5,
            "nvmlDeviceGetMaxPcieLinkWidth": lambda _gpu: 16,
            "nvmlDeviceGetNvLinkState": self._nvlink,
            "nvmlDeviceGetMigMode": lambda _gpu: [int(self.mig)] * 2,
            "nvmlDeviceGetMaxMigDeviceCount": lambda _gpu: 7,
            "nvmlDeviceGetMigDeviceHandleByIndex": self._instance,
            "nvmlDeviceGetComputeRunningProcesses": lambda _gpu: [
                SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in self.processes
            ],
            "nvmlDeviceGetGraphicsRunningProcesses": lambda _gpu: [],
        }

    @property
    def questions(self) -> list[str]:
        """Names of every function that may be asked."""
        return [*self._answers]

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvml") or name not in self._answers:
            return getattr(pynvml, name)  # errors and constants

        def ask(*args: Any) -> Any:
            self.calls.append(name)
            if name in self.failures:
                raise pynvml.NVMLError(self.failures[name])
            return self._answers[name](*args)

        return ask

    def _init(self) -> None:
        self.is_open = True

    def _shutdown(self) -> None:
        self.is_open = False

    def _memory(self, gpu: object, version: int | None = None) -> SimpleNamespace:
        size = 20 * GIB if isinstance(gpu, str) else 140 * GIB
        told = SimpleNamespace(total=size, used=self.used, free=size - self.used)
        if version is not None:
            told.reserved = GIB
        return told

    def _nvlink(self, _gpu: object, link: int) -> int:
        if link >= 4:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return int(link != 3)

    def _instance(self, _gpu: object, index: int) -> str:
        if index not in (0, 2):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return f"instance {index}"


ERRORS = (
    pynvml.NVML_ERROR_UNINITIALIZED, pynvml.NVML_ERROR_INVALID_ARGUMENT,
    pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_NO_PERMISSION, pynvml.NVML_ERROR_NOT_FOUND,
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED, pynvml.NVML_ERROR_TIMEOUT,
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
    pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED,
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, pynvml.NVML_ERROR_UNKNOWN,
)  # fmt: skip
