"""The most that GPUs can do, by NVML's name for them: memory bandwidth, and bf16 without sparsity.

Figures are those of NVIDIA's data sheets and architecture white papers for each product, which
nobody reaches: an H200 was measured here at 4.27 TB/s of copying and 664 to 795 TFLOP/s of large
products (perf/, 2026-11), 0.89 and 0.67 to 0.80 of these.
"""

from typing import Final

from runtime.capacity.gpu import Peak

_TERA: Final = 1e12
# The longest of these that the name begins with counts: (TB/s, TFLOP/s).
_KNOWN: Final = {
    "NVIDIA A100-SXM4-40GB": (1.555, 312),
    "NVIDIA A100-SXM4-80GB": (2.039, 312),
    "NVIDIA A100-PCIE-40GB": (1.555, 312),
    "NVIDIA A100 80GB PCIe": (1.935, 312),
    "NVIDIA A10": (0.600, 125),
    "NVIDIA L4": (0.300, 121),
    "NVIDIA L40": (0.864, 181),
    "NVIDIA L40S": (0.864, 362),
    "NVIDIA H100 80GB HBM3": (3.35, 989),
    "NVIDIA H100 PCIe": (2.0, 756),
    "NVIDIA H100 NVL": (3.9, 835),
    "NVIDIA H200": (4.8, 989),
    "NVIDIA H200 NVL": (4.8, 835),
    "NVIDIA H20": (4.0, 148),
    "NVIDIA GH200 480GB": (4.0, 989),
    "NVIDIA B200": (8.0, 2250),
    "NVIDIA GB200": (8.0, 2500),
    "NVIDIA GeForce RTX 4090": (1.008, 165),
    "NVIDIA GeForce RTX 5090": (1.792, 210),
}


def peak_of(name: str | None, bus_bits: int | None, max_memory_mhz: int | None) -> Peak:
    """What a GPU of this name can do; of an unknown one, what follows from its memory bus.

    bus_bits        width of the memory's bus
    max_memory_mhz  its clock; data comes twice a period
    """
    found = [known for known in _KNOWN if name is not None and _is_kind(name, known)]
    if found:
        terabytes, teraflops = _KNOWN[max(found, key=len)]
        return Peak(terabytes * _TERA, teraflops * _TERA, "NVIDIA's data sheet")
    if bus_bits and max_memory_mhz:
        rate = bus_bits / 8 * 2 * max_memory_mhz * 1e6
        return Peak(rate, None, "width and clock of the memory's bus, as NVML tells")
    return Peak(None, None, "unknown")


def _is_kind(name: str, known: str) -> bool:
    """Whether `name` is `known`, or that with more words behind it: "NVIDIA L4" is no L40."""
    return name == known or name.startswith(f"{known} ")
