"""What a rank does before it joins the others' tensors."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from engine import room
from engine.config import EngineConfig
from engine.errors import ModelError
from engine.model_config import read_model_config
from engine.rank_group import _check_alike, device_of_rank
from engine.room import refuse_beyond_memory
from engine.sharding import share_of


def test_ranks_compute_alike_whatever_auto_stands_for(checkpoint: Callable[[str], Path]) -> None:
    """Two machines may differ in what they multiply natively; sums of two kinds would hang."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    config = EngineConfig(checkpoint("llama"), device="cpu", dtype="float32")
    _check_alike(store, 0, config)
    _check_alike(store, 1, config)
    other = replace(config, dtype="bfloat16")
    told = r"rank 0 computes in torch\.float32 on cpu, and this rank in torch\.bfloat16 on cpu"
    with pytest.raises(ModelError, match=told):
        _check_alike(store, 1, other)


def test_a_rank_takes_the_device_of_its_number_on_its_machine(tmp_path: Path) -> None:
    assert device_of_rank(EngineConfig(tmp_path, device="cpu"), 3, 4).device == "cpu"
    with pytest.raises(ModelError, match="device is 'cuda:1'; with several ranks it must be auto"):
        device_of_rank(EngineConfig(tmp_path, device="cuda:1"), 1, 2)
    with pytest.raises(ModelError, match="99 ranks of this machine need as many GPUs"):
        device_of_rank(EngineConfig(tmp_path, device="cuda"), 0, 99)


def test_ranks_share_the_memory_of_their_own_machine_alone(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank's host cache takes more than half of the machine; the other rank has its own."""
    monkeypatch.setattr(room, "available_bytes", lambda: 1 << 30)
    config = EngineConfig(checkpoint("qwen3"), device="cpu", host_cache_gib=0.6)
    share, cpu = share_of(read_model_config(config.model), 0, 2), torch.device("cpu")
    refuse_beyond_memory(config, share, cpu, ranks=1)
    with pytest.raises(ModelError, match=r"host_cache_gib is 0\.6"):
        refuse_beyond_memory(config, share, cpu, ranks=2)
