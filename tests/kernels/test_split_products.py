"""Which products are cut into parts: the table, read on a CPU."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_ops import cuda_split_linear
from perf.bench_products import best_parts


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = tmp_path / "table.json"
    path.write_text(json.dumps({"a GPU": {"64x128": [[64, 2], [256, 4]]}}))
    monkeypatch.setattr(cuda_split_linear, "TABLE", path)
    cuda_split_linear.forget()
    yield path
    cuda_split_linear.forget()


@pytest.mark.parametrize(
    ("rows", "parts"), [(1, 2), (64, 2), (65, 4), (256, 4), (257, 1), (16384, 1)]
)
def test_parts_are_those_of_the_next_larger_number_of_rows(
    table: Path, rows: int, parts: int
) -> None:
    assert cuda_split_linear.parts_for("a GPU", 64, 128, rows) == parts


def test_what_was_not_measured_is_not_cut(table: Path) -> None:
    assert cuda_split_linear.parts_for("a GPU", 128, 64, 1) == 1
    assert cuda_split_linear.parts_for("another", 64, 128, 1) == 1


def test_the_benchmark_keeps_what_wins_by_more_than_noise() -> None:
    times = {(64, 1): 10.0, (64, 2): 9.95, (128, 1): 10.0, (128, 2): 9.0, (128, 4): 9.5}
    rows = [
        {"shape": "64x128", "rows": rows, "parts": parts, "us": us, "padded": 0}
        for (rows, parts), us in times.items()
    ]
    rows.append({"shape": "64x128", "rows": 128, "parts": 3, "us": 1.0, "padded": 64})
    assert best_parts(rows) == {"64x128": [[64, 1], [128, 2]]}


def test_the_table_is_well_formed() -> None:
    cuda_split_linear.forget()
    for device, products in json.loads(cuda_split_linear.TABLE.read_text()).items():
        for shape, rows in products.items():
            outputs, size = map(int, shape.split("x"))
            most = [row[0] for row in rows]
            assert most == sorted(set(most)), (device, shape)
            assert all(size % (8 * parts) == 0 for _, parts in rows), (device, shape)
            assert cuda_split_linear.parts_for(device, outputs, size, most[0]) == rows[0][1]
