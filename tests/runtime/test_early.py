"""Flags that ask for what the machine has not, before anything is loaded."""

from pathlib import Path

import pytest

from engine.config import EngineConfig
from runtime import early
from runtime.early import check_machine


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """10 GiB, and no GPU."""
    monkeypatch.setattr(early, "available_bytes", lambda: 10 << 30)
    monkeypatch.setattr(early, "has_driver", lambda: False)


def test_a_gpu_that_is_not_there() -> None:
    for device in ("cuda", "cuda:1"):
        with pytest.raises(ValueError, match=f"device is {device}, but this machine has no NVIDIA"):
            check_machine(EngineConfig(Path("m"), device=device), 1)
    check_machine(EngineConfig(Path("m"), device="auto"), 1)


def test_a_gpu_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early, "has_driver", lambda: True)
    check_machine(EngineConfig(Path("m"), device="cuda"), 1)


def test_more_host_memory_than_is_free() -> None:
    config = EngineConfig(Path("m"), host_cache_gib=6)
    check_machine(config, 1)
    with pytest.raises(ValueError, match=r"host_cache_gib is 6 for each of 2 ranks: 12\.9 GB"):
        check_machine(config, 2)
    with pytest.raises(ValueError, match="but 10.7 GB of memory are free"):
        check_machine(EngineConfig(Path("m"), host_cache_gib=11), 1)
