"""A server of this checkout as a process of its own, for programs that bring the load.

Knows nothing of what is measured.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx

_ROOT: Final = Path(__file__).resolve().parent.parent
_START_S: Final = 300.0
_END_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Served:
    """A server that answers."""

    url: str
    model: str  # what to call it in requests
    pid: int | None  # None: it is somebody else's
    log: Path | None


class ServerFailed(Exception):
    """The server did not start, or did not end as it should; carries what it said."""


@contextmanager
def serving(flags: Sequence[str], module: str = "runtime.serve") -> Iterator[Served]:
    """`python -m MODULE FLAGS`, ready; at the end it is drained and must exit with 0.

    Raises ServerFailed.
    """
    with tempfile.TemporaryDirectory(prefix="plait-") as folder:
        log = Path(folder) / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", module, "--port", "0", *flags],
                cwd=_ROOT, stdout=output, stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHON_GIL": "0"},
            )  # fmt: skip
        try:
            url = _wait_ready(process, log)
            yield Served(url, model_of(url), process.pid, log)
            process.send_signal(signal.SIGTERM)
            if process.wait(_END_S) != 0:
                raise ServerFailed(f"exit code {process.returncode}:\n{log.read_text()}")
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


def model_of(url: str) -> str:
    """The name of the one model that an OpenAI-compatible server has."""
    name: str = httpx.get(f"{url}/v1/models", timeout=30).json()["data"][0]["id"]
    return name


def _wait_ready(process: "subprocess.Popen[bytes]", log: Path) -> str:
    deadline_s = time.monotonic() + _START_S
    while time.monotonic() < deadline_s and process.poll() is None:
        found = re.search(r"is ready at (http\S+)", log.read_text())
        if found is not None:
            return found.group(1)
        time.sleep(0.1)
    raise ServerFailed(f"the server did not become ready:\n{log.read_text()}")
