"""Tensor parallelism: descriptors, collectives and steps by ranks; and what GPUs could reach.

`python -m perf.bench_tp --predict`                  the model of scaling for 2, 4 and 8 GPUs
`torchrun --nproc-per-node N -m perf.bench_tp`       what descriptors and collectives take
`torchrun … -m perf.bench_tp --model FOLDER`         also decode steps, with random weights
`torchrun … -m perf.bench_tp --part sums`            only that; may be given several times
With `--device cuda` each rank takes a GPU, and collectives are timed on it, in a CUDA graph.

descriptor  rank 0 sends a block every 2 ms, as it would while the others wait for one: its own
            time, and the time until the last rank has it. By the links that serving uses, by a ring
            in shared memory, and by a broadcast over gloo.
sums        of a layer's rows, with the residual and the norm: in one kernel, and apart
step        `launch_no_sync` and its tokens; and what a rank above 0 spends between the block and
            its return, which on a GPU is Python alone; with `--apart`, sums are not fused
"""

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import click
import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from engine.build import build_executor
from engine.config import EngineConfig
from engine.descriptor import H_VERSION, H_WORDS, HEADER_WORDS, VERSION, StepDescriptor
from engine.executor import Executor
from engine.rank_group import device_of_rank
from engine.request import Int32Array
from gpu_ops import ops
from gpu_ops.collectives import RankGroup, reduce_add_rms_norm_
from gpu_ops.process_group import ProcessGroup
from perf.results import save
from perf.scaling import MODELS, step_floor
from perf.shared_ring import SharedRing
from runtime.ranks.meeting import await_ranks, meet_rank_0
from runtime.ranks.rank import Rank

WORDS: Final = (HEADER_WORDS, 4096)  # an unchanged decode step; one with 2,000 prompt tokens
ROUNDS: Final = 300
PAUSE_S: Final = 2e-3
HIDDEN: Final = 5120
BATCHES: Final = (1, 32, 256)
SUM_ROWS: Final = (1, 8, 32, 64, 128, 256)
PARTS: Final = ("descriptors", "collectives", "sums", "steps")
CONTEXT: Final = 600
STEPS: Final = 40

Receive = Callable[[], Int32Array | None]
Way = tuple[Callable[[Int32Array], Any], Receive]


def percentiles(seconds: list[float]) -> dict[str, float]:
    """Median and 99th percentile, µs."""
    return {name: round(float(np.percentile(seconds, q)) * 1e6, 1)
            for name, q in (("median", 50), ("p99", 99))}  # fmt: skip


def time_descriptors(
    place: Rank, words: int, send: Callable[[Int32Array], Any], receive: Receive
) -> dict[str, dict[str, float]]:
    """Of this rank's side: sending on rank 0, arriving on others; the slowest rank's are kept."""
    block = np.zeros(words, np.int32)
    block[H_VERSION], block[H_WORDS] = VERSION, words
    stamp = block[14:16].view(np.int64)  # the header's last words are not used
    spent = []
    dist.barrier()
    for _ in range(ROUNDS):
        if place.rank == 0:
            time.sleep(PAUSE_S)
            stamp[0] = begun = time.monotonic_ns()
            send(block)
            spent.append((time.monotonic_ns() - begun) / 1e9)
        else:
            got = receive()
            assert got is not None, "no block came"
            spent.append((time.monotonic_ns() - int(got[14:16].view(np.int64)[0])) / 1e9)
    told: list[Any] = [None] * place.size
    dist.all_gather_object(told, percentiles(spent[10:]))
    return {"sending": told[0], "arriving": max(told[1:], key=lambda one: float(one["median"]))}


def _nothing() -> None:
    """What rank 0 receives of its own."""


def bench_descriptors(place: Rank) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    if place.rank == 0:
        _, sender = await_ranks(place, 60)
        links: Way = (sender.send, _nothing)
    else:
        _, receiver = meet_rank_0(place, 60)
        links = (lambda _: None, partial(receiver.receive, 60.0))
    path = Path("/dev/shm") / f"plait-bench-{os.getuid()}-{place.job}"
    if place.rank == 0:
        ring = SharedRing(path, create=True)
    dist.barrier()
    if place.rank > 0:
        ring = SharedRing(path, create=False)
    dist.barrier()
    path.unlink(missing_ok=True)
    gloo = dist.new_group(backend="gloo")
    for words in WORDS:
        tensor = torch.zeros(words, dtype=torch.int32)

        def broadcast(block: Int32Array, tensor: torch.Tensor = tensor) -> Int32Array:
            tensor.copy_(torch.from_numpy(block))
            dist.broadcast(tensor, 0, group=gloo)
            return tensor.numpy()

        blank = np.zeros(words, np.int32)
        ways: dict[str, Way] = {
            "links": links,
            "shared ring": (ring.send, ring.receive),
            "gloo": (broadcast, partial(broadcast, blank)),
        }
        figures[f"{4 * words} bytes"] = {
            name: time_descriptors(place, words, *way) for name, way in ways.items()
        }
    return figures


def bench_collectives(group: RankGroup, device: str) -> dict[str, Any]:
    """All-reduces of a batch's hidden states in bfloat16, and gathers of its candidates."""
    figures = {}
    for batch in BATCHES:
        x = torch.ones((batch, HIDDEN), dtype=torch.bfloat16, device=device)
        pair = torch.ones((2, batch), dtype=torch.float64, device=device)
        figures[f"batch {batch}"] = {
            "all_reduce": time_collective(partial(group.all_reduce_, x), device),
            "all_gather": time_collective(partial(group.all_gather, pair), device),
        }
    return figures


def bench_sums(group: RankGroup, device: str) -> dict[str, Any]:
    """Sums of a layer's rows in bfloat16, with the residual and the norm after them."""
    figures: dict[str, Any] = {}
    group.fuse_norms(HIDDEN, torch.bfloat16, torch.device(device))
    weight = torch.ones(HIDDEN, dtype=torch.bfloat16, device=device)
    for rows in SUM_ROWS:
        x = torch.full((rows, HIDDEN), 2.0**-9, dtype=torch.bfloat16, device=device)
        residual = torch.zeros_like(x)

        def fused(x: torch.Tensor = x, residual: torch.Tensor = residual) -> None:
            reduce_add_rms_norm_(x, residual, weight, 1e-6, group)

        def apart(x: torch.Tensor = x, residual: torch.Tensor = residual) -> None:
            ops.add_rms_norm_(group.all_reduce_(x), residual, weight, 1e-6)

        figures[f"rows {rows}"] = told = {"apart": time_collective(apart, device)}
        if group.fused is not None and group.fused.takes(x):
            told["fused"] = time_collective(fused, device)
    return figures


class Apart(ProcessGroup):
    """Ranks whose sums are not fused. Owned by the engine thread."""

    def fuse_norms(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        pass


def time_collective(run: Callable[[], object], device: str, times: int = 100) -> dict[str, float]:
    run()
    dist.barrier()
    if device == "cpu":
        spent = []
        for _ in range(times):
            begun = time.perf_counter()
            run()
            spent.append(time.perf_counter() - begun)
        return percentiles(spent)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            run()
    graph.replay()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    graph.replay()
    torch.cuda.synchronize()
    return {"median": round((time.perf_counter() - begun) / times * 1e6, 1)}


def bench_steps(executor: Executor, context: int) -> dict[str, Any]:
    """Decode steps; each rank is given the same blocks by itself."""
    figures, size = {}, executor.page_size
    pages = -(-(context + STEPS) // size)
    for batch in BATCHES:
        rows = np.arange(batch, dtype=np.int32)
        writes = [[row, index, 1 + row * pages + index] for row in rows for index in range(pages)]
        joined = np.zeros((batch, 8), np.int32)
        joined[:, 0] = rows
        segments = np.stack([rows, 0 * rows, 0 * rows + context, 0 * rows + 1], axis=1)
        for row in rows:  # one prompt a step: memory is planned for one context
            mine = [write for write in writes if write[0] == row]
            first = StepDescriptor(
                step=0, decode_rows=np.empty(0, np.int32), max_length=context,
                joined=joined[row : row + 1], page_writes=np.array(mine, np.int32),
                segments=segments[row : row + 1], prefill_tokens=np.ones(context, np.int32),
            )  # fmt: skip
            executor.launch_no_sync(first.encode()).wait_tokens_sync()
        launching, whole = [], []
        for step in range(STEPS):
            same = step > 0
            block = StepDescriptor(step, rows, same, context + step + 1).encode()
            begun = time.perf_counter()
            launched = executor.launch_no_sync(block)
            launching.append(time.perf_counter() - begun)
            launched.wait_tokens_sync()
            whole.append(time.perf_counter() - begun)
        figures[f"batch {batch}"] = {
            "step": percentiles(whole[5:]), "launch": percentiles(launching[5:]),
        }  # fmt: skip
    return figures


def predict() -> dict[str, Any]:
    figures: dict[str, Any] = {}
    table = Table("model", "batch", "GPUs", "floor, ms", "× one GPU", "collectives, %")
    for name, config in MODELS.items():
        for batch in BATCHES:
            alone = step_floor(config, 1, batch, CONTEXT).step_s
            for ranks in (1, 2, 4, 8):
                floor = step_floor(config, ranks, batch, CONTEXT)
                ms, faster = floor.step_s * 1e3, alone / floor.step_s
                share = floor.collectives_s / floor.step_s
                figures[f"{name}, batch {batch}, {ranks} GPUs"] = {
                    "floor_ms": round(ms, 2), "speedup": round(faster, 2),
                    "collectives_share": round(share, 3),
                    "gather_share": round(floor.gather_s / floor.step_s, 4),
                }  # fmt: skip
                table.add_row(name, str(batch), str(ranks), f"{ms:.2f}", f"{faster:.2f}",
                              f"{100 * share:.0f}")  # fmt: skip
    Console().print(table)
    return figures


@click.command()
@click.option("--predict", "only_predict", is_flag=True, help="The model of scaling alone.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--model", type=click.Path(path_type=Path), help="Folder with a config.json.")
@click.option("--context", default=CONTEXT, show_default=True, help="Tokens before the steps.")
@click.option("--part", "parts", type=click.Choice(PARTS), multiple=True, help="Only this.")
@click.option("--apart", is_flag=True, help="Steps without sums fused with norms.")
@click.option("--name", help="Of the file in perf/results.")
def main(
    only_predict: bool, device: str, model: Path | None, context: int, parts: tuple[str, ...],
    apart: bool, name: str | None,
) -> None:  # fmt: skip
    if only_predict:
        print(save("bench_tp_predicted", predict()))
        return
    place = Rank.of_environment()
    if place.is_alone:
        raise click.UsageError("start it by torchrun --nproc-per-node N, or with --predict")
    own = device_of_rank(
        EngineConfig(Path(), device=device), place.local_rank, place.local_size
    ).device
    if own != "cpu":
        torch.cuda.set_device(own)
    dist.init_process_group("cpu:gloo,cuda:nccl" if own != "cpu" else "gloo")
    group, parts = Apart() if apart else ProcessGroup(), parts or PARTS
    figures: dict[str, Any] = {"ranks": place.size}
    if "descriptors" in parts:
        figures["descriptors_us"] = bench_descriptors(place)
    if "collectives" in parts:
        figures["collectives_us"] = bench_collectives(group, own)
    if "sums" in parts:
        figures["sums_us"] = bench_sums(group, own)
    if model is not None and "steps" in parts:
        config = EngineConfig(
            model, device=own, load_format="dummy", max_running=max(BATCHES), cpu_threads=1,
            max_model_len=context + STEPS, max_kv_tokens=max(BATCHES) * (context + STEPS + 64),
        )  # fmt: skip
        figures["steps_us"] = bench_steps(build_executor(config, group), context)
    if place.rank == 0:
        gpu = torch.cuda.get_device_name() if own != "cpu" else None
        Console().print_json(data=figures)
        name = name or f"bench_tp_{place.size}_{'cuda' if own != 'cpu' else 'cpu'}"
        print(save(name, figures, gpu))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
