"""`./plait` before anything is prepared, and once all is."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from runtime import cli
from runtime.setup import bootstrap, interpreter, packages
from runtime.setup.cache import Cache, mark_complete
from runtime.setup.console import SetupError
from runtime.setup.interpreter import Interpreter, NotAvailable
from runtime.setup.packages import CannotCompile, Environment
from runtime.version import plait_version

FREE = Interpreter("/opt/python3.13t", (3, 13), True, ())
ORDINARY = Interpreter("/usr/bin/python3", (3, 12), False, ())


class Became(Exception):
    """What the process would have turned into."""

    def __init__(self, program: str, arguments: list[str], environ: dict[str, str]) -> None:
        self.program, self.arguments, self.environ = program, arguments, environ


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    """A user with an empty cache folder, on a machine with both kinds of interpreter."""

    def become(program: str, arguments: list[str], environ: dict[str, str]) -> None:
        raise Became(program, arguments, environ)

    def fill(shop: object, environment: Environment, *, tests: bool) -> None:
        environment.python.parent.mkdir(parents=True, exist_ok=True)
        environment.python.touch()
        mark_complete(environment.folder)
        if tests:
            mark_complete(environment.folder, packages._tests_part())

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("PLAIT_PYTHON", raising=False)
    monkeypatch.setattr(os, "execve", become)
    monkeypatch.setattr(packages, "prepare", fill)
    monkeypatch.setattr(interpreter, "free_threaded", lambda shop: FREE)
    monkeypatch.setattr(interpreter, "ordinary", lambda: ORDINARY)
    return Cache(tmp_path / "plait")


def run(*arguments: str) -> Became:
    with pytest.raises(Became) as caught:
        bootstrap.main(list(arguments))
    return caught.value


def refuse(*_: object, **__: object) -> None:
    raise AssertionError("there is nothing to prepare")


def test_help_needs_no_preparation(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bootstrap, "prepare", refuse)
    assert bootstrap.main(["--version"]) == 0
    assert capsys.readouterr().out == f"plait {plait_version()}\n"
    assert bootstrap.main(["--help"]) == bootstrap.main([]) == 0
    assert bootstrap.main(["prepare", "--help"]) == 0
    assert "serve" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["srve"], "no such command: srve"),
        (["--verbose", "serve"], "no such option: --verbose"),
        (["run"], "run: the program is missing"),
        (["prepare", "--tests", "x"], "prepare: takes --tests or nothing, not --tests x"),
        (["--python"], "--python: the name of a program is missing"),
        (["--pythonx", "serve"], "no such option: --pythonx"),
    ],
)
def test_what_it_does_not_know_is_answered_with_the_usage_and_the_reason(
    arguments: list[str],
    reason: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bootstrap, "prepare", refuse)
    assert bootstrap.main(arguments) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("Usage:")
    assert shown.endswith(f"plait: error: {reason}\n")


def test_it_has_every_command_and_names_it_in_its_usage() -> None:
    assert sorted(bootstrap.COMMANDS) == sorted([*cli.commands.commands, "prepare"])
    for name in bootstrap.COMMANDS:
        assert f"\n  {name}  " in bootstrap.USAGE


def test_it_becomes_the_command_in_the_environment(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONHOME", "/wrong")
    became = run("serve", "--port", "1")
    folder = Environment.of(cache.root, FREE).folder
    assert became.program == str(folder / "bin" / "python")
    assert became.arguments[-4:] == ["runtime.cli", "serve", "--port", "1"]
    assert became.environ["PYTHON_GIL"] == "0"
    assert "PYTHONHOME" not in became.environ
    assert became.environ["PATH"].startswith(f"{folder / 'bin'}:")
    assert became.environ["PYTHONPATH"].split(":")[0] == str(bootstrap.ROOT)


def test_a_second_start_looks_for_nothing(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run("test")
    for module, name in ((interpreter, "free_threaded"), (packages, "prepare")):
        monkeypatch.setattr(module, name, refuse)
    monkeypatch.setattr(Cache, "lock", refuse)
    assert run("test").program == run("serve").program == first.program


def test_test_packages_are_added_when_tests_are_wanted(cache: Cache) -> None:
    run("serve")
    environment = Environment.of(cache.root, FREE)
    assert not environment.is_ready(tests=True)
    run("test")
    assert environment.is_ready(tests=True)


@pytest.mark.parametrize("tests", [True, False])
def test_prepare_makes_the_packages_and_becomes_what_makes_the_model(
    cache: Cache, tests: bool
) -> None:
    became = run("prepare", *["--tests"] * tests)
    assert became.arguments[1:] == ["-P", "-m", "runtime.setup.model"]
    assert Environment.of(cache.root, FREE).is_ready(tests=tests)
    assert Environment.of(cache.root, FREE).is_ready(tests=True) is tests


def test_a_damaged_memory_is_no_memory(cache: Cache) -> None:
    run("serve")
    for text in ("{", "[]", '{"": {"version": 3}}', '{"": {"version": [3, 13], "x": 1}}'):
        (cache.root / "interpreters.json").write_text(text)
        assert run("serve").environ["PYTHON_GIL"] == "0"


@pytest.mark.parametrize("reason", [NotAvailable("no uv on PATH"), CannotCompile("no crates")])
def test_without_free_threading_it_goes_on_with_a_warning(
    cache: Cache,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    reason: Exception,
) -> None:
    def fail(_: object) -> Interpreter:
        raise reason

    monkeypatch.setattr(interpreter, "free_threaded", fail)
    monkeypatch.setenv("PYTHON_GIL", "0")
    became = run("serve")
    assert became.program == str(Environment.of(cache.root, ORDINARY).python)
    assert "PYTHON_GIL" not in became.environ
    warning = capsys.readouterr().err
    assert str(reason) in warning and "share one core" in warning


@pytest.mark.parametrize("spelling", [["--python", "mine"], ["--python=mine"], []])
def test_the_named_interpreter_is_used(
    cache: Cache, monkeypatch: pytest.MonkeyPatch, spelling: list[str]
) -> None:
    if not spelling:
        monkeypatch.setenv("PLAIT_PYTHON", "mine")
    mine = Interpreter("/opt/mine", (3, 12), False, ())
    monkeypatch.setattr(interpreter, "named", lambda name: {"mine": mine}[name])
    assert run(*spelling, "serve").program == str(Environment.of(cache.root, mine).python)


def test_an_error_is_two_lines_and_a_code(
    cache: Cache, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise SetupError("no network", "Get one.")

    monkeypatch.setattr(packages, "prepare", fail)
    assert bootstrap.main(["serve"]) == 1
    assert capsys.readouterr().err.endswith("plait: error: no network\n  Get one.\n")


def test_an_interruption_is_a_line_and_the_usual_code(
    cache: Cache, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(packages, "prepare", interrupt)
    assert bootstrap.main(["serve"]) == 130
    assert "continues from here" in capsys.readouterr().err


def test_the_script_itself_runs_from_any_folder(tmp_path: Path) -> None:
    (tmp_path / "runtime").mkdir()  # must not be taken for ours
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    answer = subprocess.run(
        [sys.executable, bootstrap.ROOT / "plait", "--help"],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        check=True,
        text=True,
    )
    assert answer.stdout.startswith("Usage: ./plait")


def test_installed_it_does_not_offer_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "_IN_CHECKOUT", False)
    result = CliRunner().invoke(cli.commands, ["test", "-x"])
    assert result.exit_code == 1
    assert "in a checkout only" in result.output


def test_a_program_that_does_not_exist_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "prepare_default", lambda: None)
    result = CliRunner().invoke(cli.commands, ["run", "no-such-program", "--flag"])
    assert result.exit_code == 1
    assert "cannot run no-such-program: No such file" in result.output
