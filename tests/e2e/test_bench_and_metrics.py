"""What `plait bench` measures is what the server says of itself."""

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from client.bench.command import bench
from client.bench.record import read_record
from tests.server_process import ServerProcess

APART = 0.02  # what either may be off by


def metrics(server: ServerProcess) -> dict[str, float]:
    """Each plain sample of /metrics, by its name."""
    found = re.findall(r"^(plait_\w+) (\S+)$", server.get("/metrics").text, re.MULTILINE)
    return {name: float(value) for name, value in found}


def test_both_sides_agree(tiny: ServerProcess, tmp_path: Path) -> None:
    """Counts exactly; times within 2 %, of answers long enough for HTTP's share to be less."""
    before, out = metrics(tiny), tmp_path / "out.json"
    asked = ["--url", tiny.url, "--requests", "8", "--concurrency", "4", "--vocab", "200"]
    asked += [
        "--output-tokens",
        "600",
        "--input-tokens",
        "20-60",
        "--warmup",
        "0",
        "--json",
        str(out),
    ]
    done = CliRunner().invoke(bench, asked)
    assert done.exit_code == 0, done.output
    after = metrics(tiny)
    change = {name: value - before.get(name, 0.0) for name, value in after.items()}
    figures = read_record(out)["figures"]
    assert change["plait_request_seconds_count"] == figures["requests"] == 8
    assert change["plait_request_prompt_tokens_sum"] == figures["input_tokens"]
    assert change["plait_request_output_tokens_sum"] == figures["output_tokens"] == 4800
    seconds = change["plait_request_seconds_sum"] / 8
    assert figures["e2e_ms"]["mean"] / 1e3 == pytest.approx(seconds, rel=APART)
    per_token = change["plait_request_time_per_output_token_seconds_sum"] / 8
    assert figures["tpot_ms"]["mean"] / 1e3 == pytest.approx(per_token, rel=APART)
