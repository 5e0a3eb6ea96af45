"""Times on a CUDA device: cold L2, medians, and the two ceilings of the machine in hand."""

import statistics
from collections.abc import Callable
from typing import Any, Final

import torch

_FLUSH_BYTES: Final = 256 << 20  # several times any L2
_FLUSHES: Final = 4  # 250 us in which the host can run ahead: else its launches are what is timed


class ColdTimer:
    """Times launches that find nothing of theirs in L2. Owned by one thread."""

    def __init__(self) -> None:
        # Read, not written: dirty lines would be written back at the timed kernel's cost.
        self._flush = torch.ones(_FLUSH_BYTES // 4, device="cuda")

    def times_us(self, run: Callable[[], object], repeats: int = 30) -> list[float]:
        """Each launch's time between two events, which add about 2 µs; after three warm-ups."""
        for _ in range(3):
            run()
        pairs = []
        for _ in range(repeats):
            for _ in range(_FLUSHES):
                self._flush.sum()
            begun, ended = (_event() for _ in range(2))
            begun.record()
            run()
            ended.record()
            pairs.append((begun, ended))
        torch.cuda.synchronize()
        return [begun.elapsed_time(ended) * 1e3 for begun, ended in pairs]

    def median_us(self, run: Callable[[], object], repeats: int = 30) -> float:
        """The median of `times_us`."""
        return statistics.median(self.times_us(run, repeats))


def capture(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A graph of `run`, which has run once before on a stream of its own."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def replay_times_ms(graph: torch.cuda.CUDAGraph, replays: int = 20) -> list[float]:
    """Times of back-to-back replays, after three warm-ups."""
    for _ in range(3):
        graph.replay()
    events = [_event() for _ in range(replays + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in zip(events, events[1:], strict=False)]


def ceilings() -> dict[str, float]:
    """Copy rate (bytes read plus written) and bf16 matrix rate, a burst and sustained for 1 s."""
    source = torch.randn(1 << 29, device="cuda").to(torch.bfloat16).repeat(4)
    target = torch.empty_like(source)
    timer = ColdTimer()
    copy_us = timer.median_us(lambda: target.copy_(source), 10)
    a, b = (torch.randn(8192, 8192, device="cuda").to(torch.bfloat16) for _ in range(2))
    gemm_us = timer.median_us(lambda: a @ b, 10)
    return {
        "copy_tb_s": 2 * source.nbytes / copy_us / 1e6,
        "gemm_8k_tflops": 2 * 8192**3 / gemm_us / 1e6,
    }


def device_facts() -> dict[str, Any]:
    """What the figures were taken on."""
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "l2_mib": properties.L2_cache_size >> 20,
        "driver": _driver(),
        "cuda": torch.version.cuda,
    }


def _driver() -> str:
    import pynvml  # only where there is a GPU; not on every host

    pynvml.nvmlInit()
    version = pynvml.nvmlSystemGetDriverVersion()
    return version if isinstance(version, str) else version.decode()


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
