"""What one GPU is and does, as values. None is what its driver does not tell; see nvml.py.

Bytes, watts, megahertz and degrees Celsius, as NVML gives them but for the units.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fault:
    """A question that NVML did not answer."""

    what: str  # the question
    why: str  # NVML's own words


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """One user of a GPU's memory."""

    pid: int
    name: str | None  # None: of another container or namespace
    user: str | None
    used_bytes: int | None  # None: the driver does not tell, as inside some containers
    is_ours: bool


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """A GPU's memory; `reserved` is the driver's own and in neither of the other two."""

    total_bytes: int
    used_bytes: int
    free_bytes: int
    reserved_bytes: int | None


@dataclass(frozen=True, slots=True)
class GpuLink:
    """A connection of a GPU: its PCIe slot."""

    generation: int | None
    width: int | None
    max_generation: int | None
    max_width: int | None


@dataclass(frozen=True, slots=True)
class NvLinks:
    """A GPU's NVLink connections."""

    active: int
    present: int


@dataclass(frozen=True, slots=True)
class Ecc:
    """Whether memory errors are corrected, and how many there were since the driver started."""

    enabled: bool
    corrected: int | None
    uncorrected: int | None


@dataclass(frozen=True, slots=True)
class Mig:
    """Whether the GPU is cut into instances, and the memory of each."""

    enabled: bool
    instances: tuple[GpuMemory, ...]


@dataclass(frozen=True, slots=True)
class GpuActivity:
    """What changes from second to second."""

    memory: GpuMemory | None
    sm_mhz: int | None
    memory_mhz: int | None
    power_w: float | None
    power_limit_w: float | None
    temperature_c: int | None
    busy_share: float | None  # of the last sampling period in which any kernel ran, 0 to 1
    throttled_by: tuple[str, ...] | None  # reasons that cost speed; idling is none
    ecc: Ecc | None


@dataclass(frozen=True, slots=True)
class Peak:
    """The most a GPU can do, and who says so."""

    bytes_per_s: float | None  # to and from its memory
    bf16_flops: float | None  # a second, dense
    source: str


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU: what it is, who uses it and what it does."""

    index: int
    name: str | None
    uuid: str | None
    compute_capability: tuple[int, int] | None
    activity: GpuActivity
    max_sm_mhz: int | None
    max_memory_mhz: int | None
    pcie: GpuLink
    nvlink: NvLinks | None
    mig: Mig | None
    processes: tuple[GpuProcess, ...] | None  # None: the driver does not tell
    peak: Peak
    faults: tuple[Fault, ...]


@dataclass(frozen=True, slots=True)
class Gpus:
    """All GPUs of this machine, or why there are none to be seen."""

    gpus: tuple[Gpu, ...]
    driver: str | None  # its version
    cuda: str | None  # the newest that the driver runs
    absent: str | None = None  # why nothing is known; None where NVML answers
