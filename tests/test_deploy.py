"""The container file and the systemd unit: their commands are Plait's, their paths are there."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import pytest

from runtime.serve import serve
from runtime.version import plait_version
from tests.test_layout import ROOT

UNIT = ROOT / "deploy" / "plait.service"
CONTAINERFILE = ROOT / "deploy" / "Containerfile"
IGNORED = ROOT / ".dockerignore"
FLAGS = {name for option in serve.params for name in (*option.opts, *option.secondary_opts)}


def check_command(words: list[str]) -> None:
    """It is `plait serve` with flags that exist, in the place of the checkout."""
    assert words[:2] == ["/opt/plait/plait", "serve"]
    flags = [word for word in words if word.startswith("--")]
    assert flags and set(flags) <= FLAGS


def unit() -> ConfigParser:
    parser = ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string(UNIT.read_text())
    return parser


def test_the_unit_starts_what_is_there() -> None:
    service = unit()["Service"]
    words = shlex.split(service["ExecStart"])
    check_command(words)
    drain_s = float(words[words.index("--drain-timeout-s") + 1])
    assert drain_s + 20 <= float(service["TimeoutStopSec"]), "the server's own end comes first"
    named = service["LoadCredential"].partition(":")[0]
    assert f"${{CREDENTIALS_DIRECTORY}}/{named}" in words


def test_the_units_user_may_write_to_its_home() -> None:
    """Everything that is prepared or compiled goes there; the rest of the system is read-only."""
    service = unit()["Service"]
    home = f"/var/lib/{service['StateDirectory']}"
    assert f"--home-dir {home} --create-home {service['User']}\n" in UNIT.read_text()
    assert service["ProtectSystem"] == "strict" and "Environment" not in service


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd here")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    """In the checkout's place, since systemd looks whether the program is there."""
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace("/opt/plait", str(ROOT)).replace("User=plait\n", ""))
    result = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(copy)],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert result.returncode == 0 and not result.stderr.strip(), result.stderr


def instructions() -> list[tuple[str, str]]:
    """(instruction, its words) of the container file, continued lines joined."""
    text = re.sub(r"^#.*\n", "", CONTAINERFILE.read_text(), flags=re.MULTILINE)
    lines = text.replace("\\\n", " ").splitlines()
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in lines if line)]


def test_the_container_starts_what_is_there() -> None:
    told = dict(instructions())  # of each the last, which is the image's own
    check_command(json.loads(told["ENTRYPOINT"]))
    assert instructions()[0][0] == "FROM" and told["USER"] == "10001:10001" and "CMD" not in told
    assert told["WORKDIR"] == "/opt/plait" and told["COPY"] == ". ."
    assert f"HOME={told['VOLUME']} " in told["ENV"], "the only folder that it may write to"
    known = {"FROM", "RUN", "ARG", "COPY", "USER", "WORKDIR", "ENV", "VOLUME", "EXPOSE",
             "STOPSIGNAL", "HEALTHCHECK", "ENTRYPOINT"}  # fmt: skip
    assert {name for name, _ in instructions()} <= known
    check = told["HEALTHCHECK"].partition("CMD ")[2]
    compile(json.loads(check)[2], "HEALTHCHECK", "exec")


def test_the_containers_shell_commands_parse() -> None:
    commands = [rest for name, rest in instructions() if name == "RUN"]
    assert "./plait prepare ${TESTS:+--tests}" in commands
    for command in commands:
        subprocess.run(["sh", "-n", "-c", command], check=True, timeout=10)


def start(folder: Path, *arguments: str) -> str:
    """What this interpreter prints, run in `folder` with the modules that are there."""
    sources = [str(folder / name) for name in (".", "http", "kernels")]
    result = subprocess.run(
        [sys.executable, "-P", *arguments], cwd=folder, capture_output=True, text=True, timeout=120,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sources), "PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_set_up_needs_no_file_but_those_that_its_stage_gets(tmp_path: Path) -> None:
    """So that another line of code elsewhere does not make an image be prepared anew."""
    (end,) = [i for i, (_, words) in enumerate(instructions()) if words.startswith("./plait ")]
    copies = [words.split() for name, words in instructions()[:end] if name == "COPY"]
    assert copies
    for *sources, target in copies:
        place = tmp_path / target
        for source in sources:
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, place, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                place.mkdir(exist_ok=True)
                shutil.copy(ROOT / source, place)
    assert "prepare" in start(tmp_path, "plait", "--help")
    assert start(tmp_path, "plait", "--version") == f"plait {plait_version()}\n"
    start(tmp_path, "-c", "import runtime.setup.convert_gguf, runtime.setup.model")


def test_an_image_gets_what_runs_and_nothing_else(tmp_path: Path) -> None:
    lines = [line for line in IGNORED.read_text().splitlines() if not line.startswith("#")]
    assert lines[0] == "*", "what lies in a checkout by chance, keys among it, stays there"
    wanted = [line.removeprefix("!") for line in lines if line.startswith("!")]
    assert wanted == ["plait", "pyproject.toml", *sorted(wanted[2:])]
    for name in wanted:
        if (ROOT / name).is_dir():
            skipped = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, tmp_path / name, ignore=skipped)
        else:
            shutil.copy(ROOT / name, tmp_path)
    code = "import runtime.server, client.bench.command"
    start(tmp_path, "-c", code)
    assert "--model" in start(tmp_path, "-m", "runtime.cli", "serve", "--help")


def test_the_router_is_started_by_a_script_that_a_shell_takes() -> None:
    """What its flags do, tests/e2e/test_router.py tries where the router is installed."""
    script = ROOT / "deploy" / "router.sh"
    assert os.access(script, os.X_OK)
    subprocess.run(["sh", "-n", script], check=True, timeout=60)
    assert "sglang-router==0.3.2" in script.read_text()  # the one that was tried
    assert "sglang-router==0.3.2" in (ROOT / "README.md").read_text()
