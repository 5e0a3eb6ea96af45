"""What control groups leave of the machine's memory."""

from pathlib import Path

import pytest

from engine.host_memory import available_bytes, group_room_bytes


def group(folder: Path, most: str, used: int, files: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{most}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {files}\nslab 7\n")


@pytest.fixture
def own(tmp_path: Path) -> Path:
    file = tmp_path / "cgroup"
    file.write_text("1:name=systemd:/x\n0::/system.slice/plait.service\n")
    return file


def test_the_tightest_of_all_groups_around_it(tmp_path: Path, own: Path) -> None:
    groups = tmp_path / "groups"
    group(groups / "system.slice" / "plait.service", "max", 10)
    group(groups / "system.slice", "5000", 3000, files=1000)
    group(groups, "4500", 100)
    assert group_room_bytes(own, groups) == 3000


def test_inside_of_a_container_the_limit_is_at_the_top(tmp_path: Path, own: Path) -> None:
    groups = tmp_path / "groups"
    group(groups, "100", 170)
    assert group_room_bytes(own, groups) == 0, "it may be above its limit for a moment"


def test_without_a_limit(tmp_path: Path, own: Path) -> None:
    groups = tmp_path / "groups"
    group(groups / "system.slice" / "plait.service", "max", 10)
    (groups / "system.slice" / "memory.max").write_text("nonsense")
    assert group_room_bytes(own, groups) is None
    assert group_room_bytes(tmp_path / "nothing", groups) is None


def test_of_this_machine() -> None:
    assert 0 < available_bytes() < 1 << 50
