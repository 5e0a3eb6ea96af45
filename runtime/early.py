"""What the flags ask of a machine that does not have it, said before seconds of loading.

Only what is certain without torch; all else is refused by the engine while it loads.
"""

import ctypes

from engine.config import EngineConfig
from engine.host_memory import available_bytes
from engine.limits import host_bytes


def check_machine(config: EngineConfig, ranks: int) -> None:
    """Raises ValueError naming field, value and limit.

    ranks  processes of this machine that share the model
    """
    if config.device.startswith("cuda") and not has_driver():
        raise ValueError(f"device is {config.device}, but this machine has no NVIDIA driver")
    wanted, free = ranks * host_bytes(config), available_bytes()
    if wanted > free:
        each = "" if ranks == 1 else f" for each of {ranks} ranks"
        raise ValueError(
            f"host_cache_gib is {config.host_cache_gib}{each}: {wanted / 1e9:.1f} GB are needed, "
            f"but {free / 1e9:.1f} GB of memory are free on the host"
        )


def has_driver() -> bool:
    """Whether CUDA's library is there, which comes with the driver."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True
