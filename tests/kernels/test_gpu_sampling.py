"""Sampling on CUDA against the definition on the CPU.

Both draw with the same u, and differ only where u falls within rounding of a boundary between two
ids: sums of float32 exponentials, relative error about 2^-21. So an id that differs must be one
that the exact running mass nearly reaches or has just left.
"""

import numpy as np
import pytest
import torch

from gpu_ops import sampling
from gpu_ops.philox import uniform

Tensor = torch.Tensor
pytestmark = pytest.mark.gpu

SLACK = 1e-5  # of the whole mass


class Rows:
    """Logits with a set of parameters per row, drawn for a test."""

    def __init__(self, n: int, vocabulary: int, dtype: torch.dtype, spread: float = 3.0) -> None:
        generator = torch.Generator().manual_seed(n * 7 + vocabulary)
        self.logits = (torch.randn((n, vocabulary), generator=generator) * spread).to(dtype)
        self.temperature = torch.full((n,), 0.6)
        self.top_k = torch.zeros(n, dtype=torch.int32)
        self.top_p, self.min_p = torch.ones(n), torch.zeros(n)
        words = torch.randint(-(2**31), 2**31 - 1, (3, n), generator=generator)
        self.seed_lo, self.seed_hi, position = words.to(torch.int32).unbind(0)
        self.position = position.abs()

    def arguments(self) -> tuple[Tensor, ...]:
        return (
            self.logits, self.temperature, self.top_k, self.top_p, self.min_p,
            self.seed_lo, self.seed_hi, self.position,
        )  # fmt: skip

    def on_gpu(self) -> Tensor:
        from gpu_ops.cuda_sampling import sample

        return sample(*(part.cuda() for part in self.arguments())).cpu()

    def check(self, what: str) -> None:
        ids, expected = self.on_gpu(), sampling.sample(*self.arguments())
        differ = (ids != expected).nonzero()[:, 0].tolist()
        print(f"{what}: {len(differ)} of {len(ids)} ids differ")
        assert len(differ) <= max(1, len(ids) // 50), what
        u = uniform(self.seed_lo, self.seed_hi, self.position)
        for row in differ:
            assert self.temperature[row] > 0, f"{what}: greedy row {row}"
            kept = sampling.kept_probabilities(
                self.logits[row], float(self.temperature[row]), int(self.top_k[row]),
                float(self.top_p[row]), float(self.min_p[row]),
            ).double()  # fmt: skip
            mass = kept.cumsum(0) / kept.sum()
            low, high = sorted((int(ids[row]), int(expected[row])))
            assert kept[ids[row]] > 0 and float(mass[high] - u[row]) >= -SLACK
            between = float(mass[high - 1] - mass[low])
            assert abs(float(mass[low] - u[row])) <= SLACK and between <= SLACK, what


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocabulary", [1, 7, 1000, 4096, 4097, 49152, 151936])
def test_plain_temperature(dtype: torch.dtype, vocabulary: int) -> None:
    Rows(33, vocabulary, dtype).check(f"{dtype} {vocabulary}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocabulary", [257, 32003, 151936])
def test_greedy_takes_the_lowest_of_equals(dtype: torch.dtype, vocabulary: int) -> None:
    rows = Rows(9, vocabulary, dtype)
    rows.temperature.zero_()
    rows.logits[4] = -3.0
    rows.logits[5, [200, 100, 256]] = 99.0
    rows.logits[6] = float("-inf")
    rows.logits[6, 77] = -5.0
    assert torch.equal(rows.on_gpu(), rows.logits.float().argmax(-1).to(torch.int32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_filters(dtype: torch.dtype) -> None:
    rows = Rows(64, 20011, dtype)
    generator = torch.Generator().manual_seed(5)
    kind = torch.arange(64) % 8
    rows.top_k[kind & 1 > 0] = 40
    rows.top_k[0], rows.top_k[8], rows.top_k[16] = 1, 20011, 30000
    rows.top_p[kind & 2 > 0] = 0.9
    rows.top_p[2], rows.top_p[10], rows.top_p[18] = 0.0, 1e-6, 0.99999
    rows.min_p[kind & 4 > 0] = 0.05
    rows.temperature = torch.rand(64, generator=generator) * 2 + 0.05
    rows.temperature[:3] = 0.0
    rows.check(f"filters {dtype}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocabulary", [151936, 32003])
def test_filters_as_models_use_them(dtype: torch.dtype, vocabulary: int) -> None:
    """Few likely ids, so that the filters find them without reading the row again."""
    rows = Rows(48, vocabulary, dtype)
    rows.logits[:, 7000:7040] += 14
    rows.top_k[::3], rows.top_p[::2], rows.min_p[::5] = 20, 0.95, 0.02
    rows.top_k[7], rows.top_k[9] = 500, 1
    rows.check(f"likely ids {dtype} {vocabulary}")


def test_flat_and_peaked_rows() -> None:
    rows = Rows(40, 151936, torch.bfloat16)
    rows.logits[:20] = 0.5  # uniform: the id is u times the vocabulary
    rows.top_p[:10] = 0.3
    rows.logits[20:, 1234] = 80.0
    rows.temperature[30:] = 1e-4
    rows.check("flat and peaked")


def test_masked_vocabulary() -> None:
    rows = Rows(8, 20000, torch.bfloat16)
    rows.logits[:, 100:19000] = float("-inf")
    rows.check("-inf over whole chunks")
    assert bool((torch.isfinite(rows.logits.gather(1, rows.on_gpu().long()[:, None]))).all())


def test_frequencies_follow_the_probabilities() -> None:
    n = 4096
    rows = Rows(n, 16, torch.float32, spread=1.0)
    rows.logits[:] = rows.logits[0]
    rows.position = torch.arange(n, dtype=torch.int32)
    rows.seed_lo[:], rows.seed_hi[:] = 42, 7
    expected = (rows.logits[0] / 0.6).softmax(0) * n
    counts = torch.bincount(rows.on_gpu().long(), minlength=16)
    squares = ((counts - expected) ** 2 / expected.clamp(min=1e-9))[expected > 5].sum()
    print(f"chi squared {float(squares):.1f}, limit 45 at 15 degrees (p = 1e-4)")
    assert float(squares) < 45


def test_nan_gives_an_id_inside_the_vocabulary() -> None:
    rows = Rows(3, 5000, torch.bfloat16)
    rows.logits[1] = float("nan")
    rows.top_p[1] = 0.5
    ids = rows.on_gpu()
    assert 0 <= int(ids.min()) and int(ids.max()) < 5000


def test_rows_indirect_and_captured() -> None:
    """A sampler as the decode loop uses it: state by row, last tokens written, replayed twice."""
    from gpu_ops.cuda_sampling import Sampler, SamplingState

    plain = Rows(5, 151936, torch.bfloat16)
    order = torch.tensor([3, 0, 4, 1, 2])
    state = SamplingState(
        *(part.cuda() for part in (plain.temperature, plain.top_k, plain.top_p, plain.min_p)),
        plain.seed_lo.cuda(), plain.seed_hi.cuda(),
    )  # fmt: skip
    logits, position = plain.logits[order].cuda(), plain.position[order].cuda()
    rows = order.to(torch.int32).cuda()
    ids = torch.full((5,), -1, dtype=torch.int32, device="cuda")
    last = torch.full((5,), -1, dtype=torch.int32, device="cuda")
    sampler = Sampler(8, 151936, torch.device("cuda"))
    sampler.sample_into(ids, logits, state, position, rows, last)
    torch.cuda.synchronize()
    first = ids.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sampler.sample_into(ids, logits, state, position, rows, last)
    for _ in range(2):
        ids.fill_(-1)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(ids, first) and torch.equal(last[order.cuda()], ids)
    assert torch.equal(ids.cpu()[order.argsort()], sampling.sample(*plain.arguments()))


def test_what_the_host_is_told() -> None:
    """Each launch in its own place, with its number, until as many others have followed."""
    from gpu_ops.cuda_sampling import Sampler, SamplingState
    from gpu_ops.host_ring import PLACES, HostRing

    plain = Rows(7, 151936, torch.bfloat16)
    state = SamplingState(
        *(part.cuda() for part in (plain.temperature, plain.top_k, plain.top_p, plain.min_p)),
        plain.seed_lo.cuda(), plain.seed_hi.cuda(),
    )  # fmt: skip
    logits, position = plain.logits.cuda(), plain.position.cuda()
    ids = torch.full((7,), -1, dtype=torch.int32, device="cuda")
    ring = HostRing(pinned, 9, torch.device("cuda"), np.empty(0, np.int32))
    sampler = Sampler(8, 151936, torch.device("cuda"))

    def run() -> None:
        ring.launches.add_(1)  # as `apply_left` does
        sampler.sample_into(ids, logits, state, position, ring=ring)
        position.add_(1)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    seen = [ids.tolist()]
    event = torch.cuda.Event()
    for launch in range(1, 3 * PLACES + 2):
        graph.replay()
        event.record()
        event.synchronize()  # all that the host may wait for
        seen.append(ids.tolist())
        for earlier in range(max(0, launch - PLACES + 1), launch + 1):
            assert ring.read(earlier, 7).tolist() == seen[earlier]
    assert (ring.ids[:, 7:] == -1).all()
    ring.launches[0] = -1  # and so 0, which is where numbers begin again
    graph.replay()
    torch.cuda.synchronize()
    assert ring.read(2**31 - 1, 7).tolist() == ids.tolist()


def pinned(words: int) -> Tensor:
    return torch.empty(words, dtype=torch.int32, pin_memory=True)
