"""Host time of launching a decode step, without a device: `CudaExecutor` without its kernels.

    python -m perf.bench_launch [--batch 256] [--steps 2000]

A scheduler with so many running requests makes the descriptors; streams, events, copies and kernels
do nothing. What remains is the Python of a launch; on a GPU the driver's calls come on top.
"""

import tempfile
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Final
from unittest import mock

import click
import numpy as np
import torch
from numpy.typing import NDArray

import perf  # noqa: F401  (the path)
from engine.cache_factory import build_prefix_cache
from engine.core import Engine
from engine.cuda_executor import CudaExecutor
from engine.load import load_model
from engine.pages import PagePool
from engine.request import Int32Array, Request, SamplingParams
from engine.scheduler import Scheduler
from engine.streams import Event, Stream
from gpu_ops.device_rows import Changes
from gpu_ops.host_ring import PLACES, HostRing
from gpu_ops.plain_decode import PlainSampler
from gpu_ops.rows_copy import RowsCopy
from perf.bench_scheduler import FACTS, EchoStep
from perf.results import save
from tests.checkpoints import build_checkpoint

_PAGE: Final = 64
_CONTEXT: Final = 4096


class NoEvent:
    """Is over at once."""

    def record(self, stream: Stream) -> None: ...

    def synchronize(self) -> None: ...


class NoStream:
    """Runs nothing."""

    cuda_stream = 0

    def wait_event(self, event: Event) -> None: ...


class NoStreams:
    """As `CudaStreams`, without a device and without work."""

    def __init__(self) -> None:
        self.copy_in: Stream = NoStream()
        self.forward: Stream = NoStream()
        self.copy_out: Stream = NoStream()
        self.pages: Stream = NoStream()

    def enter_thread(self) -> None: ...

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        return nullcontext()

    def event(self) -> Event:
        return NoEvent()

    def copy(self, to: int, source: int, size_bytes: int, stream: Stream) -> None: ...

    def copy_rows(self, copy: RowsCopy, stream: Stream) -> None: ...

    def pin(self, memory: NDArray[np.uint8]) -> None: ...

    def unpin(self, memory: NDArray[np.uint8]) -> None: ...

    def pinned(self, words: int) -> torch.Tensor:
        return torch.full((words,), 7, dtype=torch.int32)


def executor_of(batch: int) -> CudaExecutor:
    """For rows of _CONTEXT tokens; of the smallest model, which is never run."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = build_checkpoint(
            Path(folder) / "model", "qwen3", head_dim=64, max_position_embeddings=_CONTEXT
        )
        _, model = load_model(checkpoint, device="cpu", dtype="float32")
    return CudaExecutor(
        model, pages=2, page_size=_PAGE, max_rows=batch, max_pages_per_row=_CONTEXT // _PAGE,
        streams=NoStreams(), sampler=PlainSampler(), small_step_tokens=0,
    )  # fmt: skip


class Replay:
    """A decode graph's part in the ring: ids of the next launch, which is over at once."""

    def __init__(self, ring: HostRing) -> None:
        self._ids: Int32Array = ring.ids.numpy()
        self._ids[:, :, 0] = 7
        self._launch = 0

    def run(self, rows: int, forward: object) -> None:
        self._ids[self._launch % PLACES, :, 1] = self._launch
        self._launch += 1


class Timed:
    """Launches decode steps and says how long each took; makes prompts up. Owned by one thread."""

    def __init__(self, executor: CudaExecutor, pages: int) -> None:
        self._executor = executor
        self.pages, self.page_size, self.vocab_size = pages, _PAGE, executor.vocab_size
        self.times_s: list[float] = []

    def launch_no_sync(self, descriptor: Int32Array) -> EchoStep:
        begun = time.perf_counter()
        launched = self._executor.launch_no_sync(descriptor)
        self.times_s.append(time.perf_counter() - begun)
        return EchoStep(launched.wait_tokens_sync())

    def close(self) -> None:
        self._executor.close()


@click.command()
@click.option("--batch", default=256, show_default=True)
@click.option("--steps", default=2000, show_default=True)
def main(batch: int, steps: int) -> None:
    torch.set_num_threads(1)
    executor, pages = executor_of(batch), 1 + batch * _CONTEXT // _PAGE
    scheduler = Scheduler(
        pool=PagePool(pages), cache=build_prefix_cache("radix", _PAGE), max_running=batch,
        max_model_len=_CONTEXT, prefill_budget=None, eos_ids=(2,), vocab_size=0,
    )  # fmt: skip
    timed = Timed(executor, pages)
    engine = Engine(scheduler, timed, overlap=True, facts=FACTS)
    dice = np.random.default_rng(0)
    for number in range(batch):
        prompt = dice.integers(10, 200, int(dice.integers(64, 256))).astype(np.int32)
        params = SamplingParams(max_new_tokens=3000, ignore_eos=True)
        engine.submit(Request(number, prompt, params, seed=number))
    hidden, decode = torch.zeros(1, 1), executor._decode
    with (
        mock.patch.object(decode.graphs, "run", Replay(decode.ring).run),
        mock.patch.object(executor._prefill, "run", lambda *_: hidden),
        mock.patch.object(Changes, "apply", lambda changes, stream: None),
    ):
        while engine.stats().running < batch:
            engine.step()
        for _ in range(100):
            engine.step()
        timed.times_s.clear()
        for _ in range(steps):
            engine.step()
    us = 1e6 * np.array(timed.times_s)
    figures = {
        "batch": batch,
        "steps": steps,
        "median_us": round(float(np.median(us)), 1),
        "least_us": round(float(us.min()), 1),
        "p99_us": round(float(np.quantile(us, 0.99)), 1),
    }
    print(figures)
    print(save("bench_launch", figures))


if __name__ == "__main__":
    main()
