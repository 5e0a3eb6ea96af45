"""Figures, results and their comparison, without a server."""

import io
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from client.bench.command import bench
from client.bench.figures import Targets, distributions, summarise
from client.bench.load import Sample
from client.bench.options import RATE, TOKENS
from client.bench.record import read_record, write_record
from client.bench.tables import tables_of

GOOD = Sample(1.0, 2.0, (1.2, 1.4, 2.0), 10, 9, 4, "abc", "length")
SLOW = Sample(1.5, 5.0, (4.0, 5.0), 20, 3, 0, "ab", "stop")
BAD = Sample(2.0, 2.5, error="404: no")
ALL = [GOOD, SLOW, BAD]


def test_what_samples_come_to() -> None:
    figures = summarise(ALL, Targets(ttft_ms=300, itl_ms=150))
    assert (figures["requests"], figures["failed"]) == (3, 1)
    assert figures["errors"] == {"404: no": 1}
    assert figures["finish_reasons"] == {"length": 1, "stop": 1}
    assert figures["wall_s"] == 4.0 and figures["output_tokens_per_s"] == 3.0
    assert (figures["input_tokens"], figures["cached_tokens"]) == (30, 4)
    assert figures["ttft_ms"]["mean"] == pytest.approx((200 + 2500) / 2)
    assert figures["itl_ms"]["mean"] == pytest.approx((200 + 600 + 1000) / 3)
    assert figures["tpot_ms"]["p50"] == pytest.approx((100 + 500) / 2)
    assert figures["goodput_share"] == pytest.approx(1 / 3)
    assert figures["goodput_requests_per_s"] == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("targets", "kept"),
    [
        (Targets(ttft_ms=200.1), True),
        (Targets(ttft_ms=199.9), False),
        (Targets(itl_ms=100.1), True),
        (Targets(itl_ms=99.9), False),
    ],
)
def test_targets(targets: Targets, kept: bool) -> None:
    assert targets.are_kept(GOOD) is kept
    assert not targets.are_kept(BAD)


def test_what_a_server_says_does_not_control_the_terminal() -> None:
    said = "[/red]\x1b]0;title\x07\x9b2J[bold]"
    figures = summarise([GOOD, Sample(2.0, 2.5, error=said)], Targets())
    figures["finish_reasons"] = {said: 1}
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=100, no_color=True)
    console.print(tables_of(figures, said))
    shown = written.getvalue()
    assert shown.count("[/red]]0;title2J[bold]") == 3
    assert not {"\x07", "\x9b"} & {*shown} and "\x1b]" not in shown


def test_nothing_good() -> None:
    figures = summarise([BAD])
    assert figures["output_tokens"] == 0 and figures["ttft_ms"] == {}
    assert "goodput_share" not in figures
    assert set(distributions([BAD])) == {"grid"}


@pytest.mark.parametrize(("text", "found"), [("7", (7, 7)), ("1-20", (1, 20))])
def test_ranges(text: str, found: tuple[int, int]) -> None:
    assert TOKENS.convert(text, None, None) == found
    assert RATE.convert("9-2.5", None, None) == (9.0, 2.5)


def result(path: Path, label: str) -> Path:
    write_record(
        path, label=label, client={"threads": 1}, server={}, workload={"dataset": label},
        figures=summarise(ALL), distributions=distributions(ALL), samples=ALL,
    )  # fmt: skip
    return path


def compare(*arguments: str) -> Result:
    return CliRunner().invoke(bench, [word for each in arguments for word in ("--compare", each)])


def test_a_result_is_read_again(tmp_path: Path) -> None:
    record = read_record(result(tmp_path / "new" / "a.json", "a"))
    assert record["figures"] == json.loads(json.dumps(summarise(ALL)))
    assert [row[-1] for row in record["requests"]] == [None, None, "404: no"]
    assert record["requests"][1][:3] == [0.5, 2500.0, 3500.0]


def test_results_side_by_side(tmp_path: Path) -> None:
    done = compare(str(result(tmp_path / "a", "one|two")), str(result(tmp_path / "b", "b")))
    assert done.exit_code == 0
    head, line, *rows = done.stdout.splitlines()
    assert head == "|  | one/two | b |" and line == "| --- | ---: | ---: |"
    assert (
        "| output tokens/s | 3.0 | 3.0 |" in rows and "| TTFT p50, ms | 1,350.0 | 1,350.0 |" in rows
    )
    assert "not of the same workload" in done.stderr


def test_results_of_one_label_are_told_apart_by_their_files(tmp_path: Path) -> None:
    first, second = (str(result(tmp_path / name, "m")) for name in ("a", "b"))
    assert compare(first, second).stdout.startswith(f"|  | m ({first}) | m ({second}) |\n")


@pytest.mark.parametrize("text", ["{", "[]", '{"format": "other"}'])
def test_no_result(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    done = compare(str(path))
    assert done.exit_code == 2 and str(path) in done.stderr.replace("\n", "")


def test_pictures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    a, b = result(tmp_path / "a", "a"), result(tmp_path / "b", "b")
    asked = ["--compare", str(a), "--compare", str(b), "--plots", str(tmp_path / "new")]
    done = CliRunner().invoke(bench, asked)
    assert done.exit_code == 0, done.output
    for name in ("latency.png", "throughput.png"):
        assert (tmp_path / "new" / name).read_bytes().startswith(b"\x89PNG")


def test_pictures_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    a = result(tmp_path / "a", "a")
    done = CliRunner().invoke(bench, ["--compare", str(a), "--plots", str(tmp_path)])
    assert done.exit_code == 1 and "pip install 'plait[plots]'" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--dataset", "trace"], "needs a --file"),
        (["--file", "x"], "takes no --file"),
        (["--dataset", "trace", "--file", "x", "--rate", "1"], "brings its own times"),
        (["--api", "chat", "--prompts", "ids"], "take no ids"),
        (["--input-tokens", "0"], "at least 1"),
        (["--input-tokens", "9-2"], "at most the second"),
        (["--rate", "inf"], "at least 0.001"),
        (["--output-tokens", "many"], "neither a number"),
    ],
)
def test_options_that_are_refused(arguments: list[str], said: str) -> None:
    done = CliRunner().invoke(bench, arguments)
    assert done.exit_code == 2 and said in " ".join(done.stderr.replace("│", "").split())


def test_nobody_there() -> None:
    done = CliRunner().invoke(bench, ["--url", "http://127.0.0.1:9"])
    assert done.exit_code == 1 and "does not answer" in done.stderr
