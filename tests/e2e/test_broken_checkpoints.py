"""What an operator sees of a checkpoint that cannot be served: one line, and exit code 1.

What is told of each kind of damage is tested where the file is read.
"""

import shutil
from pathlib import Path

import pytest

from tests.server_process import START_S, serving_model


@pytest.mark.parametrize(
    ("name", "kept_bytes", "told"),
    [
        ("model.safetensors", 10_000, "model.safetensors cannot be read: "),
        ("tokenizer.json", 1000, "tokenizer.json: the tokenizer cannot be loaded: "),
    ],
)
def test_a_file_that_is_cut_off(
    checkpoint: Path, tmp_path: Path, name: str, kept_bytes: int, told: str
) -> None:
    folder = Path(shutil.copytree(checkpoint, tmp_path / "model"))
    (folder / name).write_bytes((folder / name).read_bytes()[:kept_bytes])
    with serving_model(folder) as server:
        assert server.process.wait(START_S) == 1
        lines = server.all_said().splitlines()
    (line,) = (line for line in lines if "CRITICAL" in line)
    assert f"the model cannot be loaded: {folder}/{told}" in line
    assert not any("Traceback" in line for line in lines)
