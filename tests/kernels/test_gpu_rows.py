"""Changes of the rows' state, by the kernel and by its plain version: equal to the last word."""

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch

from engine.descriptor import StepDescriptor
from engine.request import Int32Array
from gpu_ops.device_rows import Changes, DeviceRows, apply_left
from gpu_ops.host_ring import CHANGE_WORDS, PLACES, HostRing

ROWS, PAGES = 40, 9
NOTHING = StepDescriptor(
    step=0, decode_rows=np.empty(0, np.int32), same_decode_rows=True
).encode()  # fmt: skip
ON_DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Dice:
    """Draws descriptors of decode rows alone, or with prompts."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def descriptor(self, writes: int | None = None, *, prompts: bool = False) -> Int32Array:
        rng = self._rng

        def some(most: int) -> Int32Array:
            return rng.permutation(most)[: rng.integers(most + 1)].astype(np.int32)

        rows = some(ROWS)
        joined = rng.integers(0, 2**30, (len(rows), 8)).astype(np.int32)
        joined[:, 0] = rows
        entries = some(ROWS * PAGES) if writes is None else rng.permutation(ROWS * PAGES)[:writes]
        pages = rng.integers(0, 99, len(entries))
        page_writes = np.stack([entries // PAGES, entries % PAGES, pages], 1).astype(np.int32)
        segments, tokens = np.empty((0, 4), np.int32), np.empty(0, np.int32)
        if prompts:
            segments = np.array([[row, 3 * row, 2, 1] for row in some(ROWS)], np.int32)
            segments = segments.reshape(-1, 4)
            tokens = rng.integers(0, 99, 2 * len(segments)).astype(np.int32)
        return StepDescriptor(
            step=1, decode_rows=some(ROWS), same_decode_rows=bool(rng.integers(2)), joined=joined,
            page_writes=page_writes, segments=segments, prefill_tokens=tokens,
        ).encode()  # fmt: skip


def allocate(device: str) -> DeviceRows:
    return DeviceRows.allocate(ROWS, PAGES, torch.device(device))


def on_host(rows: DeviceRows) -> list[torch.Tensor]:
    state, sampling = rows.step, rows.sampling
    parts = [state.lengths, state.page_table, sampling.temperature, sampling.top_k, sampling.top_p]
    parts += [sampling.min_p, sampling.seed_lo, sampling.seed_hi, rows.decode_rows]
    return [part.view(torch.int32).cpu() for part in parts]


def assert_same(rows: DeviceRows, expected: DeviceRows, when: object) -> None:
    for part, other in zip(on_host(rows), on_host(expected), strict=True):
        assert torch.equal(part, other), when


def apply(block: Int32Array, rows: DeviceRows) -> None:
    staged = torch.from_numpy(block.copy()).to(rows.decode_rows.device)
    stream = torch.cuda.current_stream().cuda_stream if staged.is_cuda else 0
    Changes(staged, rows).apply(stream)


@pytest.mark.gpu
def test_staged_changes() -> None:
    dice, rows, expected = Dice(1), allocate("cuda"), allocate("cpu")
    for index in range(30):
        block = dice.descriptor(prompts=index % 2 > 0)
        apply(block, rows)
        apply(block, expected)
        torch.cuda.synchronize()
        assert_same(rows, expected, index)


def test_plain_changes_are_what_the_descriptor_says() -> None:
    rows = allocate("cpu")
    apply(
        StepDescriptor(
            step=1, decode_rows=np.array([5, 2], np.int32),
            joined=np.array([[5, 0x3F000000, 7, 0x3E800000, 0x3D800000, -1, 6, 0]], np.int32),
            page_writes=np.array([[2, 1, 33], [5, 0, 44]], np.int32),
            segments=np.array([[2, 10, 3, 1]], np.int32),
            prefill_tokens=np.array([1, 2, 3], np.int32),
        ).encode(),
        rows,
    )  # fmt: skip
    sampling, state = rows.sampling, rows.step
    assert float(sampling.temperature[5]) == 0.5 and int(sampling.top_k[5]) == 7
    assert float(sampling.top_p[5]) == 0.25 and float(sampling.min_p[5]) == 0.0625
    assert (int(sampling.seed_lo[5]), int(sampling.seed_hi[5])) == (-1, 6)
    assert int(state.page_table[2, 1]) == 33 and int(state.page_table[5, 0]) == 44
    assert int(state.lengths[2]) == 13
    assert rows.decode_rows.tolist() == [5, 2, *[ROWS] * (ROWS - 2)]


def launcher(ring: HostRing, rows: DeviceRows) -> Callable[[], None]:
    """What applies the next launch's changes; on a device, as a graph."""
    if not rows.decode_rows.is_cuda:
        return partial(apply_left, ring, rows)
    apply_left(ring, rows)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        apply_left(ring, rows)
    ring.count_on()
    return graph.replay  # type: ignore[no-any-return]


@pytest.mark.parametrize("device", ON_DEVICES)
def test_changes_left_in_the_ring(device: str) -> None:
    """As many launches ahead as there are places: each takes its own changes, or none."""
    words = PLACES * CHANGE_WORDS

    def pinned(count: int) -> torch.Tensor:
        assert count in (words, PLACES * ROWS * 2)
        return torch.full((count,), 7, dtype=torch.int32, pin_memory=device == "cuda")

    rows, expected = allocate(device), allocate("cpu")
    ring = HostRing(pinned, ROWS, torch.device(device), NOTHING)
    launch, dice, largest = launcher(ring, rows), Dice(2), 0
    for index in range(3 * PLACES + 2):
        for _ in range(1 if device == "cpu" else PLACES):
            block = None if index % 3 == 1 else dice.descriptor(writes=7 * index % 150)
            ring.leave(block)
            launch()
            if block is not None:
                apply(block, expected)
                largest = max(largest, len(block))
        if device == "cuda":
            torch.cuda.synchronize()
        assert_same(rows, expected, index)
        assert ring.launches.tolist() == [ring.leave(None)], "it counts, too"
        launch()
        if device == "cuda":
            torch.cuda.synchronize()  # before its place is written again
    assert CHANGE_WORDS // 2 < largest <= CHANGE_WORDS


def test_numbers_of_launches() -> None:
    """A host that counts wrongly is told, and numbers begin again."""

    def memory(words: int) -> torch.Tensor:
        return torch.empty(words, dtype=torch.int32)

    ring = HostRing(memory, 3, torch.device("cpu"), NOTHING)
    assert [ring.leave(None) for _ in range(PLACES + 1)] == list(range(PLACES + 1))
    ring.ids[1] = torch.tensor([[70, 1], [71, 1], [72, 5]])
    assert ring.read(1, 2).tolist() == [70, 71] and ring.read(1, 0).tolist() == []
    with pytest.raises(RuntimeError, match="launch 1 are those of"):
        ring.read(1, 3)
    with pytest.raises(RuntimeError, match="launch 5 are those of"):
        ring.read(5, 1)
    ring.launches[0] = 2**31 - 1
    ring.count_on()
    assert [ring.leave(None), ring.leave(None)] == [2**31 - 1, 0]
