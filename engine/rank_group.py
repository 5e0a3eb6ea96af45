"""Joins the ranks for what they do with tensors. Imported and called on the engine thread.

Imports torch.distributed, which takes seconds.
"""

import os
import socket
from dataclasses import replace
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist

from engine.config import EngineConfig
from engine.errors import ModelError
from gpu_ops.process_group import ProcessGroup

LOOPBACK: Final = "127.0.0.1"
# A rank that is gone is noticed by its links; this is for what nobody thought of.
_TIMEOUT: Final = timedelta(minutes=30)


def device_of_rank(config: EngineConfig, rank: int, size: int) -> EngineConfig:
    """The settings with this rank's own device. Raises ModelError where GPUs are too few."""
    if config.device == "cpu":
        return config
    if config.device not in ("auto", "cuda"):
        raise ModelError(
            f"device is {config.device!r}; with several ranks it must be auto, cpu or cuda: each "
            "rank takes the GPU of its number"
        )
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus == 0 and config.device == "auto":
        return replace(config, device="cpu")
    if gpus < size:
        raise ModelError(f"{size} ranks need as many GPUs; {gpus} are there")
    return replace(config, device=f"cuda:{rank}")


def join_group(
    device: str, rank: int, size: int, port: int, listening: socket.socket | None
) -> ProcessGroup:
    """The group of all ranks, on loopback alone. Blocks until every rank has joined.

    port       where rank 0 listens
    listening  rank 0's socket there, taken over; None on other ranks
    """
    # torch's store listens on every address of the machine unless it is given a socket.
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo")
    fd = None if listening is None else listening.detach()
    store = dist.TCPStore(  # type: ignore[attr-defined]
        LOOPBACK, port, size, fd is not None, _TIMEOUT, wait_for_workers=False, master_listen_fd=fd
    )
    on_cuda = device.startswith("cuda")
    if on_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if on_cuda else "gloo",
        store=store,
        rank=rank,
        world_size=size,
        timeout=_TIMEOUT,
        device_id=torch.device(device) if on_cuda else None,
    )
    return ProcessGroup()
