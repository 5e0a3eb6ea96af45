"""The container file and the systemd unit: their commands are Plait's, their paths are there."""

import json
import os
import re
import shlex
import shutil
import subprocess
from configparser import ConfigParser
from pathlib import Path

import pytest

from runtime.serve import serve
from tests.test_layout import ROOT

UNIT = ROOT / "deploy" / "plait.service"
CONTAINERFILE = ROOT / "deploy" / "Containerfile"
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
    told = dict(instructions())
    check_command(json.loads(told["ENTRYPOINT"]))
    assert told["COPY"].split()[-2:] == [".", "/opt/plait"]
    assert instructions()[0][0] == "FROM" and told["USER"] == "10001" and "CMD" not in told
    known = {"FROM", "RUN", "COPY", "USER", "WORKDIR", "ENV", "EXPOSE", "STOPSIGNAL",
             "HEALTHCHECK", "ENTRYPOINT"}  # fmt: skip
    assert {name for name, _ in instructions()} <= known
    check = told["HEALTHCHECK"].partition("CMD ")[2]
    compile(json.loads(check)[2], "HEALTHCHECK", "exec")


def test_the_containers_shell_commands_parse() -> None:
    commands = [rest for name, rest in instructions() if name == "RUN"]
    assert len(commands) == 3
    for command in commands:
        subprocess.run(["sh", "-n", "-c", command], check=True, timeout=10)
    assert (ROOT / "plait").is_file() and commands[-1] == "./plait run true"


def test_the_router_is_started_by_a_script_that_a_shell_takes() -> None:
    """What its flags do, tests/e2e/test_router.py tries where the router is installed."""
    script = ROOT / "deploy" / "router.sh"
    assert os.access(script, os.X_OK)
    subprocess.run(["sh", "-n", script], check=True, timeout=60)
    assert "sglang-router==0.3.2" in script.read_text()  # the one that was tried
    assert "sglang-router==0.3.2" in (ROOT / "README.md").read_text()
