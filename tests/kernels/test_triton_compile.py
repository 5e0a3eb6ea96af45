"""Programs become machine code for an H100 on any host, once; and what the tables say fits it."""

import json
from pathlib import Path

import pytest

from gpu_ops import cuda_moe, moe_tiles, triton_compile
from gpu_ops.cuda_compile import CompileError
from gpu_ops.moe_tiles import MoeShape, Tile, Tiles, all_tiles, tiles_for
from gpu_ops.triton_compile import Program, compiled

SHARED_BYTES = 232_448  # of one block on compute capability 9.0
SUM = Program(
    "moe_kernels", "combine", ("*bf16", "*bf16"),
    (("SIZE", 48), ("TOP_K", 2), ("BLOCK", 64), ("OVERLAP", 1)), 4, 1, 90,
)  # fmt: skip


def model(shape: MoeShape) -> cuda_moe.Model:
    return cuda_moe.Model(shape, True, "unknown", 90)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLAIT_CACHE", str(tmp_path))


def test_what_was_compiled_is_not_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    (first,) = compiled([SUM])
    assert first.code[:4] == b"\x7fELF" and first.name == "combine" and first.threads == 128

    def refuse(programs: list[Program]) -> None:
        raise AssertionError(programs)

    monkeypatch.setattr(triton_compile, "_compile_elsewhere", refuse)
    assert compiled([SUM, SUM]) == [first, first]


def test_what_triton_refuses_is_told() -> None:
    broken = Program("moe_kernels", "combine", SUM.types, SUM.constants[1:], 4, 1, 90)
    with pytest.raises(CompileError, match="Triton refused a kernel"):
        compiled([broken])


def test_a_small_model_in_float32_compiles() -> None:
    shape = MoeShape(20, 7, 6, 3, 4)
    programs = cuda_moe.programs_of(model(shape), tiles_for("unknown", shape, 5), few=True)
    made = compiled([*programs])
    assert [cubin.name for cubin in made] == ["route", "align", "gate_up", "down", "combine"]
    assert max(cubin.shared_bytes for cubin in made) <= SHARED_BYTES


def test_the_table_names_tiles_of_every_number_of_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = MoeShape(64, 32, 8, 2, 2)
    few, many = (Tiles(m, Tile(32, 64, 4, 3, 1), Tile(64, 64, 4, 2, 0)) for m in (16, 64))
    rows = [
        {"tokens": most, "block_m": t.block_m, "gate_up": [*t.gate_up], "down": [*t.down]}
        for most, t in ((8, few), (64, many))
    ]
    table = tmp_path / "tiles.json"
    table.write_text(json.dumps({"a GPU": {str(shape): rows}}))
    monkeypatch.setattr(moe_tiles, "TABLE", table)
    moe_tiles.forget()
    try:
        assert [tiles_for("a GPU", shape, n) for n in (1, 8, 9, 64, 5000)] == [few] * 2 + [many] * 3
        assert [*all_tiles("a GPU", shape)] == [few, many]
        assert tiles_for("another", shape, 1) not in (few, many)
    finally:
        moe_tiles.forget()


def test_the_table_in_the_package_can_be_read() -> None:
    for shapes in json.loads(moe_tiles.TABLE.read_text()).values():
        for rows in shapes.values():
            tokens = [row["tokens"] for row in rows]
            assert tokens == sorted(set(tokens))
            for tiles in map(moe_tiles.read_tiles, rows):
                assert tiles.block_m >= 8 and tiles.gate_up.warps in (4, 8)
