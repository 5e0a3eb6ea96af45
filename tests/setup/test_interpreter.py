"""Which Python set-up takes, with made-up programs on PATH."""

import sys
from pathlib import Path

import pytest

from runtime.setup import debian, interpreter
from runtime.setup.cache import Cache, is_complete
from runtime.setup.console import SetupError
from tests.fakes_setup import FakeWorkshop, program, python


@pytest.fixture
def bin_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder on PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


@pytest.fixture
def shop(tmp_path: Path) -> FakeWorkshop:
    return FakeWorkshop(Cache(tmp_path / "cache"))


def test_314t_on_path_is_preferred(bin_folder: Path, shop: FakeWorkshop) -> None:
    python(bin_folder / "python3.13t", (3, 13), free_threaded=True)
    best = python(bin_folder / "python3.14t", (3, 14), free_threaded=True)
    found = interpreter.free_threaded(shop)
    assert (found.executable, found.tag) == (str(best), "cp314t")
    assert not shop.commands


@pytest.mark.parametrize(
    "script", ["exit 1", "echo nonsense", "echo '{\"executable\": 1}'; kill -9 $$"]
)
def test_what_does_not_answer_is_passed_over(
    bin_folder: Path, shop: FakeWorkshop, script: str
) -> None:
    program(bin_folder / "python3.14t", script)
    second = python(bin_folder / "python3.13t", (3, 13), free_threaded=True)
    assert interpreter.free_threaded(shop).executable == str(second)


def test_an_ordinary_build_by_a_free_threaded_name_is_passed_over(
    bin_folder: Path, shop: FakeWorkshop
) -> None:
    python(bin_folder / "python3.14t", (3, 14), free_threaded=False)
    second = python(bin_folder / "python3.13t", (3, 13), free_threaded=True)
    assert interpreter.free_threaded(shop).executable == str(second)


def test_a_kept_build_is_taken_before_uv(bin_folder: Path, shop: FakeWorkshop) -> None:
    program(bin_folder / "uv", "exit 1")
    folder = shop.cache.root / "python-3.13.5t"
    kept = python(folder / "bin" / "python3.13t", (3, 13), free_threaded=True)
    assert interpreter.free_threaded(shop).executable == str(kept)
    assert is_complete(folder)
    assert not shop.commands


def test_a_kept_build_that_lost_modules_is_not_taken(bin_folder: Path, shop: FakeWorkshop) -> None:
    folder = shop.cache.root / "python-3.13.5t"
    python(folder / "bin" / "python3.13t", (3, 13), free_threaded=True, missing=["ssl"])
    with pytest.raises(interpreter.NotAvailable):
        interpreter.free_threaded(shop)
    assert not is_complete(folder)


def test_uv_fetches_314t_into_the_cache(bin_folder: Path, shop: FakeWorkshop) -> None:
    program(bin_folder / "uv", "exit 1")
    installed = shop.cache.root / "uv" / "cpython-3.14.1t" / "bin" / "python3.14t"

    def install(command: object) -> bool:
        python(installed, (3, 14), free_threaded=True)
        return True

    shop.act = install
    assert interpreter.free_threaded(shop).executable == str(installed)
    assert shop.commands == [[str(bin_folder / "uv"), "python", "install", "3.14t"]]


def test_a_build_follows_where_uv_fails(
    bin_folder: Path, shop: FakeWorkshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(bin_folder / "uv", "exit 1")
    shop.act = lambda command: False
    folder = shop.cache.root / "python-3.13.9t"

    def build(_: object) -> Path:
        python(folder / "bin" / "python3.13t", (3, 13), free_threaded=True)
        return folder

    monkeypatch.setattr(debian, "build", build)
    assert interpreter.free_threaded(shop).tag == "cp313t"
    assert is_complete(folder)


def test_every_reason_is_named_where_there_is_none(
    bin_folder: Path, shop: FakeWorkshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    python(bin_folder / "python3.13t", (3, 13), free_threaded=True, missing=["ssl", "zlib"])

    def refuse(_: object) -> Path:
        raise debian.CannotBuild("no C compiler to build one with (apt install gcc)")

    monkeypatch.setattr(debian, "build", refuse)
    with pytest.raises(interpreter.NotAvailable) as caught:
        interpreter.free_threaded(shop)
    for part in ("lacks the modules ssl, zlib", "no uv on PATH", "apt install gcc"):
        assert part in str(caught.value)


def test_the_named_one_is_taken_whatever_else_there_is(bin_folder: Path) -> None:
    python(bin_folder / "python3.14t", (3, 14), free_threaded=True)
    mine = python(bin_folder / "mine", (3, 12), free_threaded=False)
    found = interpreter.named("mine")
    assert (found.executable, found.tag, found.free_threaded) == (str(mine), "cp312", False)


@pytest.mark.parametrize(
    ("version", "free_threaded", "missing", "part"),
    [
        ((3, 10), False, [], "is cp310; the packages need 3.11 to 3.14"),
        ((3, 15), True, [], "is cp315t; the packages need 3.13 to 3.14"),
        ((3, 12), False, ["ensurepip"], "apt install python3-venv"),
    ],
)
def test_a_named_one_that_will_not_do_is_refused_with_the_reason(
    bin_folder: Path, version: tuple[int, int], free_threaded: bool, missing: list[str], part: str
) -> None:
    python(bin_folder / "mine", version, free_threaded=free_threaded, missing=missing)
    with pytest.raises(SetupError, match="--python") as caught:
        interpreter.named("mine")
    assert part in caught.value.problem


def test_a_name_that_is_not_there_is_refused(bin_folder: Path) -> None:
    with pytest.raises(SetupError, match="nowhere is not a Python that runs"):
        interpreter.named("nowhere")


def test_the_ordinary_one_is_the_running_one_first(
    bin_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = python(bin_folder / "running", (3, 11), free_threaded=False)
    python(bin_folder / "python3", (3, 12), free_threaded=False)
    monkeypatch.setattr(sys, "executable", str(running))
    assert interpreter.ordinary().executable == str(running)


def test_no_usable_python_at_all_says_why(
    bin_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = python(bin_folder / "python3", (3, 11), free_threaded=False, missing=["ensurepip"])
    monkeypatch.setattr(sys, "executable", str(bare))
    with pytest.raises(SetupError, match="python3-venv"):
        interpreter.ordinary()


def test_this_interpreter_answers_the_real_question() -> None:
    found = interpreter.probe(sys.executable)
    assert found is not None
    assert found.version == sys.version_info[:2]
    assert found.missing == ()
