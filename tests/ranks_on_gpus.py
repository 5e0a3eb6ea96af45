"""What ranks with a GPU each must find of their sums; `tests/kernels/test_gpu_reduce.py` starts it.

`torchrun --nproc-per-node N -m tests.ranks_on_gpus WHAT`, WHAT being
right    sums against float64, equal bits on all ranks, replayed graphs: a line of JSON by rank 0
late     the last rank never comes: the others' kernels give up
killed   the last rank is gone: the others wait, until torchrun ends them
"""

import json
import os
import sys
import time
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist

from gpu_ops import symmetric_rows
from gpu_ops.collectives import reduce_add_rms_norm_
from gpu_ops.process_group import ProcessGroup

Tensor = torch.Tensor

EPS: Final = 1e-6
REPLAYS: Final = 2000
ROWS: Final = (1, 3, 31, 256)
SHAPES: Final = (
    (1000, torch.bfloat16), (2880, torch.bfloat16), (5120, torch.bfloat16),
    (8192, torch.bfloat16), (1024, torch.float32), (8192, torch.float32),
)  # fmt: skip


def worst_errors(group: ProcessGroup, rows: int, size: int, dtype: torch.dtype) -> dict[str, float]:
    """Of the residual and of its norm, in units of what rounding once allows; and unequal bits."""
    common = torch.Generator("cuda").manual_seed(rows)
    own = torch.Generator("cuda").manual_seed(1000 * group.rank + rows)
    residual, weight = (
        torch.randn(shape, device="cuda", generator=common).to(dtype)
        for shape in ((rows, size), (size,))
    )
    x = torch.randn((rows, size), device="cuda", generator=own).to(dtype)
    terms = torch.stack((x.double(), x.double().abs()))
    dist.all_reduce(terms)
    exact = terms[0] + residual.double()
    is_fused = group.fused is not None and group.fused.takes(x)
    # What is not fused is rounded before the residual is added too, and they may cancel.
    scale = exact.abs() if is_fused else terms[1] + residual.double().abs()
    out = reduce_add_rms_norm_(x, residual, weight, EPS, group)
    # Float32 sums of up to nine terms of about 1, which may cancel; and of 8192 squares.
    unit = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-20
    allowed = unit * scale + 2.0**-20
    normed = residual.double()
    normed = normed * torch.rsqrt(normed.square().mean(-1, keepdim=True) + EPS) * weight.double()
    both = torch.stack((residual, out)).view(torch.uint8)
    told = group.all_gather(both)
    return {
        "residual": float(((residual.double() - exact).abs() / allowed).max()),
        "norm": float(((out.double() - normed).abs() / (unit * normed.abs() + 2.0**-20)).max()),
        "unequal": int((told != told[:1]).sum()),
    }


def wrong_in_replays(group: ProcessGroup, size: int) -> int:
    """Sums that were not what they had to be, over 2,000 replays of nine sums and one of NCCL's.

    Every replay adds other numbers, whole ones that bfloat16 holds: what is late or early by a
    round is noticed. Ranks are delayed against each other at random.
    """
    number = torch.zeros((), device="cuda")
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    weight = torch.ones(size, device="cuda", dtype=torch.bfloat16)
    terms = sum(range(1, group.size + 1))

    def sums() -> None:
        number.add_(1).remainder_(5)
        for rows in (256, 7, 64):
            x = (number * (group.rank + 1)).to(torch.bfloat16).expand(rows, size).contiguous()
            residual = torch.zeros_like(x)
            out = reduce_add_rms_norm_(x, residual, weight, EPS, group)
            wrong.add_((residual != number * terms).sum())
            wrong.add_((out != number.sign()).sum())
            residual = torch.zeros_like(x)
            for _ in range(2):  # one right after the other
                out = reduce_add_rms_norm_(out, residual, weight, EPS, group)
            wrong.add_((residual != number.sign() * 2 * group.size).sum())
        total = group.all_reduce_(number.clone())
        wrong.add_((total != number * group.size).sum())

    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        sums()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sums()
    dice = torch.Generator().manual_seed(group.rank)
    for delay in torch.randint(0, 200_000, (REPLAYS,), generator=dice).tolist():
        if delay < 25_000:
            torch.cuda._sleep(delay)  # type: ignore[no-untyped-call]  # cycles
        graph.replay()
    return int(wrong)


def tell_right(group: ProcessGroup, device: torch.device) -> None:
    told: dict[str, object] = {}
    for size, dtype in SHAPES:
        group.fuse_norms(size, dtype, device)
        assert group.fused is not None, "no symmetric memory: see the log"
        for rows in ROWS:
            name = f"{rows} x {size} {str(dtype).removeprefix('torch.')}"
            told[name] = worst_errors(group, rows, size, dtype)
        if size == 5120:
            told["wrong in replays"] = wrong_in_replays(group, size)
            told["apart"] = worst_errors(group, 300, size, dtype)  # too many rows: NCCL and a norm
    if group.rank == 0:
        print(json.dumps(told), flush=True)


def await_the_last(group: ProcessGroup, device: torch.device, *, killed: bool) -> None:
    """The last rank does not launch its sum."""
    if not killed:
        symmetric_rows.PATIENCE_S = 2  # type: ignore[misc]
    group.fuse_norms(1024, torch.bfloat16, device)
    x = torch.ones((4, 1024), dtype=torch.bfloat16, device=device)
    reduce_add_rms_norm_(x, x.clone(), x[0], EPS, group)
    torch.cuda.synchronize()
    dist.barrier()
    if group.rank == group.size - 1:
        time.sleep(1.0)  # the others wait by then
        if not killed:
            time.sleep(10.0)
        os._exit(3)
    begun = time.monotonic()
    reduce_add_rms_norm_(x, x.clone(), x[0], EPS, group)
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        waited = time.monotonic() - begun
        print(json.dumps({"gave up": str(error).splitlines()[0], "after": waited}), flush=True)
    os._exit(0)


def main() -> None:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device, timeout=timedelta(minutes=2))
    group = ProcessGroup()
    with torch.inference_mode():
        if sys.argv[1] == "right":
            tell_right(group, device)
        else:
            await_the_last(group, device, killed=sys.argv[1] == "killed")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
