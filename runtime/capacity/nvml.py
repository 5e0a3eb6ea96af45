"""Reads GPUs through NVML, question by question: what is not answered is None, and told as a fault.

Guarantees: no error of NVML leaves this module. A driver that is missing or goes away, a GPU that
is lost, a question that needs more permission: each ends in a value that says so. That a GPU does
not have something (`NOT_SUPPORTED`) is no fault.

Knows nothing of models. Calls take microseconds to milliseconds, and seconds where a driver hangs:
not to be made on a thread that others wait for.
"""

import os
import pwd
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import pynvml

from runtime.capacity.gpu import (
    Ecc,
    Fault,
    Gpu,
    GpuActivity,
    GpuLink,
    GpuMemory,
    GpuProcess,
    Gpus,
    Mig,
    NvLinks,
)
from runtime.capacity.peaks import peak_of

Value = TypeVar("Value")

_MOST_LINKS: Final = 18  # NVLinks of a GPU, of any kind known
# Reasons for a lower clock that cost speed; nvml.h, nvmlClocksEventReasons.
_THROTTLES: Final = (
    ("software power cap", 0x4),
    ("hardware slowdown", 0x8),
    ("software thermal slowdown", 0x20),
    ("hardware thermal slowdown", 0x40),
    ("power brake", 0x80),
)


class Nvml:
    """An open connection to the driver. Owned by the thread that made it."""

    def __init__(self, library: Any = pynvml) -> None:
        """library  what has pynvml's functions; tests put a fake in its place

        Never raises: where there is no driver, `read` says so.
        """
        self._nvml = library
        self._absent = self._open()

    def _open(self) -> str | None:
        """Why there is nothing to be asked; None where there is."""
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as error:
            return f"NVML cannot be used: {error}"
        return None

    def read(self) -> Gpus:
        """Every GPU as it is now. A driver that was gone is asked for anew."""
        if self._absent is not None:
            self._absent = self._open()
        if self._absent is not None:
            return Gpus((), None, None, self._absent)
        asked = _Asked(self._nvml)
        count = asked.ask("number of GPUs", self._nvml.nvmlDeviceGetCount)
        if count is None:
            self.close()
            why = asked.faults[0].why if asked.faults else "not supported"
            self._absent = f"NVML does not tell of GPUs: {why}"
            return Gpus((), None, None, self._absent)
        driver = asked.ask("driver version", self._nvml.nvmlSystemGetDriverVersion)
        cuda = asked.ask("CUDA version", self._nvml.nvmlSystemGetCudaDriverVersion_v2)
        absent = None if count else "the driver sees no GPU"
        gpus = tuple(self._gpu(index) for index in range(count))
        return Gpus(gpus, driver, None if cuda is None else _cuda_name(cuda), absent)

    def close(self) -> None:
        """Gives the connection back; `read` makes a new one."""
        if self._absent is None:
            self._absent = "closed"
            try:
                self._nvml.nvmlShutdown()
            except self._nvml.NVMLError:
                pass  # the driver is gone, and with it what there was to give back

    def _gpu(self, index: int) -> Gpu:
        nvml, asked = self._nvml, _Asked(self._nvml)
        handle = asked.ask("handle", nvml.nvmlDeviceGetHandleByIndex, index)
        if handle is None:
            return _unknown_gpu(index, asked.faults)
        of = _GpuQuestions(nvml, asked, handle)
        name = asked.ask("name", nvml.nvmlDeviceGetName, handle)
        max_memory_mhz = of.max_clock("largest memory clock", nvml.NVML_CLOCK_MEM)
        bus_bits = asked.ask("memory bus", nvml.nvmlDeviceGetMemoryBusWidth, handle)
        return Gpu(
            index=index,
            name=name,
            uuid=asked.ask("uuid", nvml.nvmlDeviceGetUUID, handle),
            compute_capability=asked.ask(
                "compute capability", nvml.nvmlDeviceGetCudaComputeCapability, handle
            ),
            activity=of.activity(),
            max_sm_mhz=of.max_clock("largest SM clock", nvml.NVML_CLOCK_SM),
            max_memory_mhz=max_memory_mhz,
            pcie=of.pcie(),
            nvlink=of.nvlink(),
            mig=of.mig(),
            processes=of.processes(),
            peak=peak_of(name, bus_bits, max_memory_mhz),
            faults=tuple(asked.faults),
        )


class _Asked:
    """Asks, and keeps what was not answered. Owned by the thread that asks."""

    def __init__(self, library: Any) -> None:
        self._nvml = library
        self.faults: list[Fault] = []

    def ask(self, what: str, call: Callable[..., Value], *args: object) -> Value | None:
        """The answer; None where there is none."""
        try:
            return call(*args)
        except self._nvml.NVMLError as error:
            if error.value != self._nvml.NVML_ERROR_NOT_SUPPORTED:
                self.faults.append(Fault(what, str(error)))
            return None


class _GpuQuestions:
    """What is asked of one GPU. Owned by the thread that asks."""

    def __init__(self, library: Any, asked: _Asked, handle: Any) -> None:
        self._nvml, self._asked, self._handle = library, asked, handle

    def _ask(self, what: str, call: Callable[..., Any], *args: object) -> Any:
        return self._asked.ask(what, call, self._handle, *args)

    def activity(self) -> GpuActivity:
        nvml, ask = self._nvml, self._ask
        milliwatts = ask("power", nvml.nvmlDeviceGetPowerUsage)
        limit = ask("power limit", nvml.nvmlDeviceGetEnforcedPowerLimit)
        busy = ask("utilisation", nvml.nvmlDeviceGetUtilizationRates)
        reasons = ask("throttling", nvml.nvmlDeviceGetCurrentClocksThrottleReasons)
        return GpuActivity(
            memory=self._memory(self._handle),
            sm_mhz=ask("SM clock", nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM),
            memory_mhz=ask("memory clock", nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_MEM),
            power_w=None if milliwatts is None else milliwatts / 1e3,
            power_limit_w=None if limit is None else limit / 1e3,
            temperature_c=ask(
                "temperature", nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU
            ),
            busy_share=None if busy is None else busy.gpu / 100,
            throttled_by=None
            if reasons is None
            else tuple(name for name, bit in _THROTTLES if reasons & bit),
            ecc=self._ecc(),
        )

    def _memory(self, handle: Any) -> GpuMemory | None:
        nvml = self._nvml
        told = self._asked.ask(
            "memory", nvml.nvmlDeviceGetMemoryInfo, handle, nvml.nvmlMemory_v2
        )  # fmt: skip
        if told is not None:
            return GpuMemory(told.total, told.used, told.free, told.reserved)
        plain = self._asked.ask("memory", nvml.nvmlDeviceGetMemoryInfo, handle)  # older drivers
        if plain is None:
            return None
        return GpuMemory(plain.total, plain.used, plain.free, None)

    def _ecc(self) -> Ecc | None:
        nvml = self._nvml
        mode = self._ask("ECC", nvml.nvmlDeviceGetEccMode)
        if mode is None:
            return None
        counts = [
            self._ask("ECC errors", nvml.nvmlDeviceGetTotalEccErrors, kind, nvml.NVML_VOLATILE_ECC)
            for kind in (
                nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED,
                nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
            )
            if mode[0]
        ]
        return Ecc(True, *counts) if counts else Ecc(False, None, None)

    def max_clock(self, what: str, kind: int) -> int | None:
        clock: int | None = self._ask(what, self._nvml.nvmlDeviceGetMaxClockInfo, kind)
        return clock

    def pcie(self) -> GpuLink:
        nvml, ask = self._nvml, self._ask
        return GpuLink(
            ask("PCIe generation", nvml.nvmlDeviceGetCurrPcieLinkGeneration),
            ask("PCIe width", nvml.nvmlDeviceGetCurrPcieLinkWidth),
            ask("largest PCIe generation", nvml.nvmlDeviceGetMaxPcieLinkGeneration),
            ask("largest PCIe width", nvml.nvmlDeviceGetMaxPcieLinkWidth),
        )

    def nvlink(self) -> NvLinks | None:
        """None where the GPU has none. Links are asked one by one until there are no more."""
        nvml, states = self._nvml, []
        for link in range(_MOST_LINKS):
            try:
                states.append(nvml.nvmlDeviceGetNvLinkState(self._handle, link))
            except nvml.NVMLError as error:
                if error.value not in (
                    nvml.NVML_ERROR_NOT_SUPPORTED,
                    nvml.NVML_ERROR_INVALID_ARGUMENT,
                ):
                    self._asked.faults.append(Fault("NVLink", str(error)))
                break
        return NvLinks(sum(map(bool, states)), len(states)) if states else None

    def mig(self) -> Mig | None:
        nvml = self._nvml
        mode = self._ask("MIG", nvml.nvmlDeviceGetMigMode)
        if mode is None:
            return None
        if not mode[0]:
            return Mig(False, ())
        instances = []
        for index in range(self._ask("MIG instances", nvml.nvmlDeviceGetMaxMigDeviceCount) or 0):
            try:
                handle = nvml.nvmlDeviceGetMigDeviceHandleByIndex(self._handle, index)
            except nvml.NVMLError as error:
                if error.value != nvml.NVML_ERROR_NOT_FOUND:  # that is a free place
                    self._asked.faults.append(Fault("MIG instance", str(error)))
                continue
            memory = self._memory(handle)
            if memory is not None:
                instances.append(memory)
        return Mig(True, tuple(instances))

    def processes(self) -> tuple[GpuProcess, ...] | None:
        """Those that compute and those that draw, the largest first."""
        nvml = self._nvml
        computing = self._ask("processes", nvml.nvmlDeviceGetComputeRunningProcesses)
        if computing is None:
            return None
        drawing = self._ask("processes", nvml.nvmlDeviceGetGraphicsRunningProcesses) or []
        used = {each.pid: each.usedGpuMemory for each in [*drawing, *computing]}
        told = [
            GpuProcess(pid, process_name(pid), process_user(pid), size, pid == os.getpid())
            for pid, size in used.items()
        ]
        return tuple(sorted(told, key=lambda each: (-(each.used_bytes or 0), each.pid)))


def process_name(pid: int) -> str | None:
    """A process's name; None for one that is not to be seen from here."""
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def process_user(pid: int) -> str | None:
    """Whose process it is; None for one that is not to be seen from here."""
    try:
        uid = Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        return None
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _cuda_name(version: int) -> str:
    """13000 is 13.0: nvml.h, nvmlSystemGetCudaDriverVersion."""
    return f"{version // 1000}.{version % 1000 // 10}"


def _unknown_gpu(index: int, faults: list[Fault]) -> Gpu:
    nothing = GpuActivity(None, None, None, None, None, None, None, None, None)
    link = GpuLink(None, None, None, None)
    return Gpu(
        index, None, None, None, nothing, None, None, link, None, None, None,
        peak_of(None, None, None), tuple(faults),
    )  # fmt: skip
