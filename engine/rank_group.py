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
from engine.load import resolve_dtype
from engine.model_config import read_model_config
from gpu_ops.process_group import ProcessGroup

# A rank that is gone is noticed by its links; this is for what nobody thought of.
_TIMEOUT: Final = timedelta(minutes=30)


def device_of_rank(config: EngineConfig, rank: int, size: int) -> EngineConfig:
    """The settings with this rank's own device. Raises ModelError where GPUs are too few.

    rank, size  among the ranks of this machine
    """
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
        raise ModelError(f"{size} ranks of this machine need as many GPUs; {gpus} are there")
    return replace(config, device=f"cuda:{rank}")


def join_group(
    config: EngineConfig,
    rank: int,
    size: int,
    address: tuple[str, int],
    interface: str | None,
    listening: socket.socket | None,
) -> ProcessGroup:
    """The group of all ranks. Blocks until every rank has joined.

    config     with this rank's own device
    address    where rank 0 listens
    interface  by which this rank reaches that, and the others reach it, unless the environment
               names one; None: NCCL and gloo choose
    listening  rank 0's socket, taken over; None on other ranks

    Raises ModelError where this rank would compute otherwise than rank 0 does.
    """
    # torch's store listens on every address of the machine unless it is given a socket.
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if interface is not None:
            os.environ.setdefault(name, interface)
    fd = None if listening is None else listening.detach()
    store = dist.TCPStore(  # type: ignore[attr-defined]
        *address, size, fd is not None, _TIMEOUT, wait_for_workers=False, master_listen_fd=fd
    )
    _check_alike(store, rank, config)
    on_cuda = config.device.startswith("cuda")
    if on_cuda:
        torch.cuda.set_device(config.device)
    dist.init_process_group(
        "nccl" if on_cuda else "gloo",
        store=store,
        rank=rank,
        world_size=size,
        timeout=_TIMEOUT,
        device_id=torch.device(config.device) if on_cuda else None,
    )
    return ProcessGroup()


def _check_alike(
    store: dist.Store,  # type: ignore[name-defined]
    rank: int,
    config: EngineConfig,
) -> None:
    """Machines differ: what "auto" stands for need not be the same on all, and must be."""
    device = torch.device(config.device)
    dtype = resolve_dtype(config.dtype, read_model_config(config.model), device)
    own = f"{dtype} on {device.type}"
    if rank == 0:
        store.set("kind", own)
        return
    kind = store.get("kind").decode()
    if kind != own:
        raise ModelError(f"rank 0 computes in {kind}, and this rank in {own}")
