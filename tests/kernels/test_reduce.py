"""Sums over ranks with residual and norm, without a device: the plain form, and who fuses."""

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist

from gpu_ops import reference, symmetric_rows
from gpu_ops.collectives import reduce_add_rms_norm_
from gpu_ops.cuda_compile import compiled
from gpu_ops.process_group import ProcessGroup
from gpu_ops.symmetric_rows import MAX_ROWS, Memory, reason_against
from tests.fakes_ranks import ThreadGroup, ThreadRanks

Tensor = torch.Tensor
EPS = 1e-6
CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("ranks", "rows", "size"), [(2, 1, 8), (3, 5, 24), (4, 0, 16), (4, 7, 64)])
def test_the_plain_form_is_a_sum_and_a_norm(
    ranks: int, rows: int, size: int, dtype: torch.dtype
) -> None:
    x = torch.randn((ranks, rows, size)).to(dtype)
    residual, weight = torch.randn((rows, size)).to(dtype), torch.randn(size).to(dtype)
    shared = ThreadRanks(ranks)

    def of_rank(rank: int) -> tuple[Tensor, Tensor]:
        own = residual.clone()
        group = ThreadGroup(shared, rank)
        return reduce_add_rms_norm_(x[rank].clone(), own, weight, EPS, group), own

    with ThreadPoolExecutor(ranks) as threads:
        told = list(threads.map(of_rank, range(ranks)))
    total = x[0].clone()
    for part in x[1:]:
        total += part
    expected = reference.add_rms_norm_(total, residual, weight, EPS)
    for out, own in told:
        assert torch.equal(out, expected) and torch.equal(own, residual)


def test_without_a_group_it_is_the_norm() -> None:
    x, residual, weight = torch.randn(3, 16), torch.randn(3, 16), torch.randn(16)
    sums = residual.clone()
    expected = reference.add_rms_norm_(x, sums, weight, EPS)
    assert torch.equal(reduce_add_rms_norm_(x, residual, weight, EPS, None), expected)
    assert torch.equal(residual, sums)


@dataclass
class FewRows:
    """A `FusedSum` of up to two rows, which counts what it is given. Owned by one test."""

    given: list[int] = field(default_factory=list)

    def takes(self, x: Tensor) -> bool:
        return len(x) <= 2

    def reduce_add_rms_norm_(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> Tensor:
        self.given.append(len(x))
        return reference.add_rms_norm_(x, residual, weight, eps)


def test_only_what_is_taken_is_fused() -> None:
    group, fused = ThreadGroup(ThreadRanks(1), 0), FewRows()
    group.fused = fused
    for rows in (1, 3, 2):
        reduce_add_rms_norm_(torch.ones(rows, 8), torch.ones(rows, 8), torch.ones(8), EPS, group)
    assert fused.given == [1, 2]


@pytest.fixture
def alone() -> Iterator[ProcessGroup]:
    """A group of this process, over gloo."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield ProcessGroup()
    dist.destroy_process_group()


def test_gloo_says_that_sums_are_apart(
    alone: ProcessGroup, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        alone.fuse_norms(64, torch.float32, torch.device("cpu"))
    assert alone.fused is None
    assert [record.message for record in caplog.records] == [
        "the ranks' sums are not fused with norms: the ranks are on cpu"
    ]
    x, residual, weight = torch.randn(3, 16), torch.randn(3, 16), torch.randn(16)
    expected = reference.add_rms_norm_(x.clone(), residual.clone(), weight, EPS)
    assert torch.equal(reduce_add_rms_norm_(x, residual, weight, EPS, alone), expected)


def test_gpus_without_symmetric_memory_warn_and_go_on(
    alone: ProcessGroup, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(symmetric_rows, "reason_against", lambda *_: "")

    def refuse(*_: object) -> Tensor:
        raise RuntimeError("no fabric\nand more")

    monkeypatch.setattr(symmetric_rows, "_allocate", refuse)
    alone.fuse_norms(64, torch.float32, CUDA)
    assert alone.fused is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and "no fabric" in record.message


def test_one_rank_that_cannot_keeps_all_from_it(
    alone: ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is agreed on before anybody waits in a rendezvous."""
    monkeypatch.setattr(symmetric_rows, "reason_against", lambda *_: "")

    def gathered(told: list[object], own: object) -> None:
        told[:] = [own, "cuda:1 does not reach its peers' memory"]

    def never(*_: object) -> Tensor:
        raise AssertionError("rank 1 is not there")

    monkeypatch.setattr(dist, "all_gather_object", gathered)
    monkeypatch.setattr(symmetric_rows, "_allocate", never)
    made = symmetric_rows.make_symmetric_rows(64, torch.float32, CUDA)
    assert made == (None, "cuda:1 does not reach its peers' memory")


def test_one_rank_without_memory_keeps_all_from_the_rendezvous(
    alone: ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(symmetric_rows, "reason_against", lambda *_: "")
    monkeypatch.setattr(symmetric_rows, "_allocate", lambda *_: torch.zeros(8))
    told: list[str] = []

    def gathered(of_all: list[object], own: object) -> None:
        told.append(str(own))
        of_all[:] = [own, "OutOfMemoryError: none left" if len(told) == 2 else ""]

    def never(*_: object) -> None:
        raise AssertionError("rank 1 does not come")

    monkeypatch.setattr(dist, "all_gather_object", gathered)
    monkeypatch.setattr(symmetric_rows, "_exchange", never)
    made = symmetric_rows.make_symmetric_rows(64, torch.float32, CUDA)
    assert made == (None, "OutOfMemoryError: none left") and told == ["", ""]


@pytest.mark.parametrize(
    ("size", "dtype", "ranks", "capability", "gpus", "reaches", "reason"),
    [
        (5120, torch.bfloat16, 2, (9, 0), 2, True, ""),
        (8192, torch.float32, 8, (9, 0), 8, True, ""),
        (5120, torch.bfloat16, 9, (9, 0), 9, True, "9 ranks"),
        (5120, torch.float16, 2, (9, 0), 2, True, "float16"),
        (5124, torch.bfloat16, 2, (9, 0), 2, True, "5124"),
        (16384, torch.bfloat16, 2, (9, 0), 2, True, "16384"),
        (5120, torch.bfloat16, 2, (8, 0), 2, True, "sm_90"),
        (5120, torch.bfloat16, 2, (9, 0), 2, False, "does not reach"),
        (5120, torch.bfloat16, 4, (9, 0), 2, True, "does not reach"),
    ],
)
def test_what_is_taken(
    monkeypatch: pytest.MonkeyPatch, size: int, dtype: torch.dtype, ranks: int,
    capability: tuple[int, int], gpus: int, reaches: bool, reason: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: reaches)
    found = reason_against(size, dtype, CUDA, ranks)
    assert reason in found and bool(reason) == bool(found)


@pytest.mark.parametrize("ranks", range(2, 9))
def test_slots_begin_where_a_line_begins(ranks: int) -> None:
    memory = Memory(ranks, 5120, 2)
    assert memory.header_bytes % 128 == 0
    assert memory.bytes - memory.header_bytes == 2 * MAX_ROWS * ranks * 5120 * 2


@pytest.mark.parametrize(("ranks", "size", "element_bytes"), [(2, 5120, 2), (8, 8192, 4)])
def test_the_kernel_compiles(ranks: int, size: int, element_bytes: int) -> None:
    macros = {
        "RANKS": ranks, "SIZE": size, "ELEMENT_BYTES": element_bytes, "THREADS": size // 8,
        "VECTORS": 1, "MAX_ROWS": MAX_ROWS, "PATIENCE_S": 120,
    }  # fmt: skip
    assert compiled("reduce_norm.cu", "sm_90", macros)[:4] == b"\x7fELF"


def test_ranks_on_several_machines_have_no_memory_in_common(
    monkeypatch: pytest.MonkeyPatch, alone: ProcessGroup, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(dist, "get_world_size", lambda: 8)
    monkeypatch.setattr(symmetric_rows, "make_symmetric_rows", lambda *_: pytest.fail("tried"))
    group = ProcessGroup()
    assert (group.size, group.local_size) == (8, 4)
    group.fuse_norms(64, torch.float32, CUDA)
    assert group.fused is None and "several machines" in caplog.text
