"""What `plait bench` measures is what the server says of itself."""

import re
from pathlib import Path

from click.testing import CliRunner
from pytest import approx

from client.bench.command import bench
from client.bench.record import read_record
from tests.server_process import ServerProcess

APART = 0.02  # what either may be off by
RUNS = 3


def metrics(server: ServerProcess) -> dict[str, float]:
    """Each plain sample of /metrics, by its name."""
    found = re.findall(r"^(plait_\w+) (\S+)$", server.get("/metrics").text, re.MULTILINE)
    return {name: float(value) for name, value in found}


def test_both_sides_agree(tiny: ServerProcess, tmp_path: Path) -> None:
    """Counts exactly; times within 2 %, of answers long enough for HTTP's share to be less.

    A busy machine keeps the client waiting beside the server: one of a few runs is held to it.
    """
    apart = list[float]()
    while not apart or apart[-1] > APART:
        assert len(apart) < RUNS, apart
        apart.append(times_apart(tiny, tmp_path / f"{len(apart)}.json"))


def times_apart(server: ServerProcess, out: Path) -> float:
    """The larger part by which the times of one run differ."""
    before = metrics(server)
    asked = ["--url", server.url, "--requests", "8", "--concurrency", "4", "--vocab", "200"]
    asked += ["--output-tokens", "600", "--input-tokens", "20-60", "--warmup", "0"]
    done = CliRunner().invoke(bench, [*asked, "--json", str(out)])
    assert done.exit_code == 0, done.output
    after = metrics(server)
    change = {name: value - before.get(name, 0.0) for name, value in after.items()}
    record = read_record(out)
    figures, own_ms = record["figures"], record["server"]["own_means_ms"]
    assert change["plait_request_seconds_count"] == figures["requests"] == 8
    assert change["plait_request_prompt_tokens_sum"] == figures["input_tokens"]
    assert change["plait_request_output_tokens_sum"] == figures["output_tokens"] == 4800
    own = f"TTFT {own_ms['ttft']:,.1f}, ITL {own_ms['itl']:,.1f}"
    assert f"the server's own means, ms: {own}" in done.output
    assert own_ms["ttft"] == approx(change["plait_time_to_first_token_seconds_sum"] / 8 * 1e3)
    of_server = (
        change["plait_request_seconds_sum"],
        change["plait_request_time_per_output_token_seconds_sum"],
    )
    of_client = figures["e2e_ms"]["mean"], figures["tpot_ms"]["mean"]
    return max(
        abs(client / 1e3 / (server / 8) - 1)
        for client, server in zip(of_client, of_server, strict=True)
    )
