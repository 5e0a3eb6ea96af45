"""CUDA graphs of a forward pass, one for each of a few sizes. Knows neither rows nor prompts."""

from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import Any

import torch

Tensor = torch.Tensor
Forward = Callable[[int], Tensor]  # of a size; launches on the current stream


class ForwardGraphs:
    """Replays a forward pass of a size that was captured. Owned by the engine thread.

    sizes  captured, ascending
    pool   the graphs' memory, once there is one; graphs of another pass may share it
    """

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.pool: Any = None
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}  # and its result

    def capture(self, sizes: Iterable[int], forward: Forward, stream: Any) -> None:
        """Graphs for these sizes, on the device's own stream; call it while idle.

        All share one memory pool, so the largest comes first.
        """
        for size in sorted(sizes, reverse=True):
            forward(size)  # outside of a graph: libraries set themselves up on first use
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self.pool, stream=stream):
                result = forward(size)
            self.pool = self.pool or graph.pool()
            self._graphs[size] = graph, result
        self.sizes = sorted(self._graphs)

    def padded(self, size: int) -> int:
        """The smallest size captured that holds `size`, or itself where none does."""
        at = bisect_left(self.sizes, size)
        return self.sizes[at] if at < len(self.sizes) else size

    def run(self, size: int, forward: Forward) -> Tensor:
        """What `forward` gives for a size, valid until the next run."""
        captured = self._graphs.get(size)
        if captured is None:
            return forward(size)
        graph, result = captured
        graph.replay()
        return result
