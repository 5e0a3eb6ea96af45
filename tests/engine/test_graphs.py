"""What is captured, in which order and memory, and what is replayed; the device is a fake."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from engine.graphs import ForwardGraphs

STREAM = object()


class Device:
    """Notes what happens, in order."""

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []

    def forward(self, size: int) -> torch.Tensor:
        self.log.append(("forward", size))
        return torch.full((size,), len(self.log))

    def new_graph(self) -> "Graph":
        return Graph(self)

    @contextmanager
    def capturing(self, graph: "Graph", pool: Any, stream: Any) -> Iterator[None]:
        assert stream is STREAM
        self.log.append(("begin", pool))
        yield
        graph.size = self.log[-1][1]


class Graph:
    def __init__(self, device: Device) -> None:
        self.device, self.size = device, 0

    def pool(self) -> str:
        return f"of {self.size}"

    def replay(self) -> None:
        self.device.log.append(("replay", self.size))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", made.new_graph)
    monkeypatch.setattr(torch.cuda, "graph", made.capturing)
    return made


def test_without_graphs_a_pass_has_its_own_size(device: Device) -> None:
    graphs = ForwardGraphs()
    assert graphs.padded(5) == 5 and graphs.sizes == [] and graphs.pool is None
    assert len(graphs.run(5, device.forward)) == 5
    assert device.log == [("forward", 5)]


def test_the_largest_is_captured_first_and_gives_the_pool(device: Device) -> None:
    graphs = ForwardGraphs()
    graphs.capture([2, 8, 4], device.forward, STREAM)
    assert device.log == [
        *(("forward", 8), ("begin", None), ("forward", 8)),
        *(("forward", 4), ("begin", "of 8"), ("forward", 4)),
        *(("forward", 2), ("begin", "of 8"), ("forward", 2)),
    ]
    assert graphs.sizes == [2, 4, 8] and graphs.pool == "of 8"


def test_more_graphs_may_come_and_share_a_pool(device: Device) -> None:
    graphs = ForwardGraphs()
    graphs.pool = "another's"
    graphs.capture([8], device.forward, STREAM)
    graphs.capture([3], device.forward, STREAM)
    assert [entry for entry in device.log if entry[0] == "begin"] == [("begin", "another's")] * 2
    assert graphs.sizes == [3, 8] and graphs.pool == "another's"


def test_a_replay_gives_what_was_captured(device: Device) -> None:
    graphs = ForwardGraphs()
    graphs.capture([2, 4], device.forward, STREAM)
    assert [graphs.padded(size) for size in (1, 2, 3, 4, 5)] == [2, 2, 4, 4, 5]
    device.log.clear()
    first, again = (graphs.run(4, device.forward) for _ in range(2))
    assert first is again and len(first) == 4
    assert device.log == [("replay", 4)] * 2
