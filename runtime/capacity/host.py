"""The machine itself: cores, memory, and what its processors multiply natively. Linux."""

import os
from pathlib import Path

from engine.host_memory import available_bytes, memory_sizes
from runtime.capacity.report import Host

_MEMORY = Path("/proc/meminfo")
_CPU = Path("/proc/cpuinfo")
_BFLOAT16 = {"avx512_bf16", "amx_tile"}  # as torch looks for; see engine.load.resolve_dtype


def read_host(memory: Path = _MEMORY) -> Host:
    """Cores and memory as they are now; None for what cannot be read."""
    sizes = memory_sizes(memory)
    available = available_bytes(memory) if "MemAvailable" in sizes else None
    return Host(os.cpu_count() or 1, sizes.get("MemTotal"), available)


def multiplies_bfloat16(cpu: Path = _CPU) -> bool:
    """Whether the CPU does; False where that cannot be read."""
    try:
        flags = [line for line in cpu.read_text().splitlines() if line.startswith("flags")]
    except OSError:
        return False
    return bool(flags) and not _BFLOAT16.isdisjoint(flags[0].split())
