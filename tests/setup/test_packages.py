"""Reading locks, and filling an environment from wherever the last attempt stopped."""

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from runtime.setup import packages
from runtime.setup.cache import Cache, mark_complete
from runtime.setup.console import SetupError
from runtime.setup.interpreter import Interpreter
from runtime.setup.packages import CannotCompile, Environment, batches, read_lock
from tests.fakes_setup import FakeWorkshop, program

LOCK = """\
# comment
alpha==1.0 \\
    --hash=sha256:aa \\
    --hash=sha256:ab
Beta-x[extra]==2.0 ; python_version < '3.12' \\
    --hash=sha256:bb
tokenizers==0.22.2 \\
    --hash=sha256:cc
"""
FREE = Interpreter("/opt/python3.13t", (3, 13), True, ())
ORDINARY = Interpreter("/usr/bin/python3", (3, 12), False, ())


def test_a_lock_is_read_entry_by_entry() -> None:
    pins = read_lock(LOCK)
    assert [pin.name for pin in pins] == ["alpha", "beta-x", "tokenizers"]
    assert pins[0].lines.splitlines()[-1] == "    --hash=sha256:ab"
    assert "\n".join(pin.lines for pin in pins) + "\n" == LOCK.removeprefix("# comment\n")


def test_what_is_built_from_source_comes_first() -> None:
    groups = batches(read_lock(LOCK))
    assert [[pin.name for pin in group] for group in groups] == [
        ["tokenizers"],
        ["alpha", "beta-x"],
    ]


def test_our_locks_pin_and_hash_everything_once() -> None:
    runtime = read_lock((packages.LOCKS / "runtime.txt").read_text())
    tests = read_lock((packages.LOCKS / "test.txt").read_text())
    for pins in (runtime, tests):
        assert len({pin.name for pin in pins}) == len(pins) > 20
        assert all("==" in pin.lines and "--hash=sha256:" in pin.lines for pin in pins)
    version = {pin.name: pin.lines.split()[0] for pin in runtime}
    assert all(version.get(pin.name, pin.lines.split()[0]) == pin.lines.split()[0] for pin in tests)


def test_the_environment_is_named_for_interpreter_and_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = tmp_path / "locks"
    lock.mkdir()
    (lock / "runtime.txt").write_text(LOCK)
    monkeypatch.setattr(packages, "LOCKS", lock)
    first = Environment.of(tmp_path, FREE).folder
    assert first.name.startswith("cp313t-")
    assert Environment.of(tmp_path, FREE).folder == first
    assert Environment.of(tmp_path, ORDINARY).folder != first
    (lock / "runtime.txt").write_text(LOCK + "more==1\n")
    assert Environment.of(tmp_path, FREE).folder != first


class Machine(FakeWorkshop):
    """Plays venv and pip, as far as files go; a word in `failing` makes the command fail."""

    failing: str = ""

    def wheels_built(self) -> int:
        return sum("wheel" in command for command in self.commands)

    def act(self, command: Sequence[str]) -> bool:
        if self.failing and any(self.failing in word for word in command):
            return False
        if "venv" in command:
            shutil.rmtree(command[-1], ignore_errors=True)
            program(Path(command[-1]) / "bin" / "python", "true")
        if "wheel" in command:
            requirements = Path(command[-1])
            if self.failing and self.failing in requirements.read_text():
                return False
            for pin in read_lock(requirements.read_text()):
                (requirements.parent / f"{pin.name}-1.0-py3-none-any.whl").write_bytes(b"wheel")
        return True


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    program(tmp_path / "bin" / "cargo", "true")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setattr(packages, "_ROOM_BYTES", 1)
    return Machine(Cache(tmp_path / "cache"))


def prepared(
    machine: Machine, interpreter: Interpreter = FREE, *, tests: bool = False
) -> Environment:
    environment = Environment.of(machine.cache.root, interpreter)
    packages.prepare(machine, environment, tests=tests)
    return environment


def test_an_environment_is_filled_once(machine: Machine) -> None:
    environment = prepared(machine)
    assert environment.is_ready(tests=False) and not environment.is_ready(tests=True)
    machine.commands.clear()
    prepared(machine)
    assert machine.commands == []
    assert prepared(machine, tests=True).is_ready(tests=True)
    assert not any("venv" in command for command in machine.commands)
    assert list((machine.cache.root / "wheels").iterdir()) == []


def test_a_second_attempt_keeps_the_batches_of_the_first(machine: Machine) -> None:
    machine.failing = "wsproto"
    with pytest.raises(SetupError, match="it did not work(.|\n)*continues where it stopped"):
        prepared(machine)
    before, machine.failing = machine.wheels_built(), ""
    machine.commands.clear()
    prepared(machine)
    assert before > 5
    assert machine.wheels_built() == 1


def test_an_interrupted_unpacking_starts_from_an_empty_environment(machine: Machine) -> None:
    machine.failing = "--no-index"
    with pytest.raises(SetupError):
        prepared(machine)
    half = Environment.of(machine.cache.root, FREE).folder / "lib" / "half"
    half.mkdir(parents=True)
    machine.failing = ""
    machine.commands.clear()
    prepared(machine)
    assert machine.wheels_built() == 0
    assert not half.exists()


def test_an_environment_whose_packages_do_not_import_is_not_ready(machine: Machine) -> None:
    machine.failing = "import torch"
    with pytest.raises(SetupError):
        prepared(machine)
    assert not Environment.of(machine.cache.root, FREE).is_ready(tests=False)


def test_an_environment_without_its_interpreter_is_not_ready(machine: Machine) -> None:
    environment = prepared(machine)
    environment.python.unlink()
    environment.python.symlink_to("/nowhere/python3")
    assert not environment.is_ready(tests=False)


def test_new_test_packages_do_not_disturb_the_rest(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locks = tmp_path / "locks"
    shutil.copytree(packages.LOCKS, locks)
    monkeypatch.setattr(packages, "LOCKS", locks)
    environment = prepared(machine, tests=True)
    with (locks / "test.txt").open("a") as file:
        file.write("extra==1.0 \\\n    --hash=sha256:ee\n")
    assert environment.is_ready(tests=False) and not environment.is_ready(tests=True)
    assert prepared(machine, tests=True).folder == environment.folder


def test_what_cannot_be_compiled_is_told_before_the_big_download(machine: Machine) -> None:
    machine.failing = "tokenizers"
    with pytest.raises(CannotCompile, match="tokenizers could not be built, which takes Rust 1.80"):
        prepared(machine)
    assert machine.wheels_built() == 1
    with pytest.raises(SetupError):
        prepared(machine, ORDINARY)


def test_a_server_does_without_what_is_optional(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.failing = "llguidance"
    assert prepared(machine).is_ready(tests=False)
    assert (
        "llguidance could not be built, which takes Rust 1.87 or later" in capsys.readouterr().err
    )
    with pytest.raises(SetupError):
        prepared(machine, ORDINARY)


def test_no_cargo_is_told_at_once(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "bin" / "cargo").unlink()
    with pytest.raises(CannotCompile, match="need cargo, best of Rust 1.87 or later"):
        prepared(machine)
    assert machine.commands == []
    assert prepared(machine, ORDINARY).is_ready(tests=False)


def test_too_little_room_is_told_with_both_figures(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages, "_ROOM_BYTES", 10**18)
    with pytest.raises(SetupError, match="free; the packages need 1000000000.0 GB(.|\n)*XDG_CACHE"):
        prepared(machine)


def test_the_gil_is_kept_off_where_it_can_be() -> None:
    assert packages.gil_off(FREE) == {"PYTHON_GIL": "0"}
    assert packages.gil_off(ORDINARY) == {}


def test_pips_output_becomes_a_status() -> None:
    status = packages.PipStatus()
    assert status("  Downloading torch-2.11.0-cp313-cp313t.whl (530.7 MB)") == "downloading torch"
    assert status("Progress 1000000 of 530000000") == "downloading torch: 1 MB of 530 MB"
    assert status("  Building wheel for tokenizers (pyproject.toml): started") == (
        "building tokenizers"
    )
    assert status("Looking in links: /opt/wheels") is None


def test_a_stamped_environment_of_this_interpreter_is_ready(tmp_path: Path) -> None:
    environment = Environment.of(tmp_path, FREE)
    environment.python.parent.mkdir(parents=True)
    environment.python.symlink_to(sys.executable)
    assert not environment.is_ready(tests=False)
    mark_complete(environment.folder)
    assert environment.is_ready(tests=False)
