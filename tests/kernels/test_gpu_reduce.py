"""Sums over ranks fused with residual and norm, between GPUs; and two ranks on one GPU.

What must be right between GPUs is in `tests/ranks_on_gpus.py`: processes, started once.
"""

import json
import os
import socket
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

Tensor = torch.Tensor
pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parent.parent.parent
EPS = 1e-6


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port: int = bound.getsockname()[1]
        return port


def run_ranks(what: str) -> tuple[int, dict[str, Any], float]:
    """Exit code, what rank 0 told, and seconds."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--master-addr", "127.0.0.1",
         "--master-port", str(free_port()), "--nproc-per-node", "2",
         "-m", "tests.ranks_on_gpus", what],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"},
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    print(done.stdout, done.stderr)
    return done.returncode, json.loads(lines[0]) if lines else {}, time.monotonic() - begun


@cache
def right() -> dict[str, Any]:
    code, told, _ = run_ranks("right")
    assert code == 0
    return told


def test_sums_are_those_of_float64() -> None:
    cases = {name: case for name, case in right().items() if isinstance(case, dict)}
    assert len(cases) == 25
    for name, case in cases.items():
        print(name, case)
        assert case["residual"] <= 1.0 and case["norm"] <= 1.0, name


def test_every_rank_has_the_same_bits() -> None:
    assert all(case["unequal"] == 0 for case in right().values() if isinstance(case, dict))


def test_replays_between_those_of_nccl() -> None:
    assert right()["wrong in replays"] == 0


def test_a_peer_that_never_comes_ends_the_process() -> None:
    code, told, _ = run_ranks("late")
    assert code != 0 and 2.0 <= told["after"] < 8.0
    assert "CUDA error" in told["gave up"]


def test_a_dead_peer_keeps_nobody_from_being_ended() -> None:
    code, told, seconds = run_ranks("killed")
    assert code != 0 and not told and seconds < 60


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_on_one_gpu(ranks: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their kernels run beside each other, on streams of their own: few blocks, so all fit."""
    from gpu_ops import symmetric_rows
    from gpu_ops.symmetric_rows import Memory, SymmetricRows

    monkeypatch.setattr(symmetric_rows, "PATIENCE_S", 10)

    size, most = 1000, 64 // ranks
    memory = Memory(ranks, size, dtype.itemsize)
    memories = [torch.zeros(memory.bytes, dtype=torch.uint8, device="cuda") for _ in range(ranks)]
    peers = [one.data_ptr() for one in memories]
    sums = [SymmetricRows(rank, size, dtype, memories[rank], peers, None) for rank in range(ranks)]
    streams = [torch.cuda.Stream() for _ in range(ranks)]
    weight = torch.randn(size, device="cuda").to(dtype)
    unit = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-20
    for rows in (1, most, 3, 0, most, 2, 1):
        x = torch.randn((ranks, rows, size), device="cuda").to(dtype)
        before = torch.randn((rows, size), device="cuda").to(dtype)
        residuals = [before.clone() for _ in range(ranks)]
        for stream in streams:
            with torch.cuda.stream(stream):  # its memory, before a kernel waits for another's
                torch.empty_like(before)
        torch.cuda.synchronize()
        outs: list[Tensor] = []
        for rank, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                outs.append(sums[rank].reduce_add_rms_norm_(x[rank], residuals[rank], weight, EPS))
        torch.cuda.synchronize()
        exact = x.double().sum(0) + before.double()
        assert bool(((residuals[0].double() - exact).abs() <= unit * exact.abs() + 2.0**-19).all())
        normed = residuals[0].double()
        normed *= torch.rsqrt(normed.square().mean(-1, keepdim=True) + EPS) * weight.double()
        assert bool(((outs[0].double() - normed).abs() <= unit * normed.abs() + 2.0**-19).all())
        for rank in range(1, ranks):
            assert torch.equal(residuals[rank], residuals[0]) and torch.equal(outs[rank], outs[0])
