"""Figures as people read them: a table for the terminal, and Markdown for several runs."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich.console import Group
from rich.table import Table
from rich.text import Text

from client.terminal import printable

# (what it is called, where it lies in the figures, how many decimals)
_RATES: Final = (
    ("output tokens/s", "output_tokens_per_s", 1),
    ("all tokens/s", "total_tokens_per_s", 1),
    ("requests/s", "requests_per_s", 2),
    ("goodput, requests/s", "goodput_requests_per_s", 2),
)
_TIMES: Final = (("TTFT", "ttft_ms"), ("ITL", "itl_ms"), ("TPOT", "tpot_ms"), ("e2e", "e2e_ms"))
_SHOWN: Final = ("mean", "p50", "p90", "p99")


def tables_of(figures: Mapping[str, Any], title: str) -> Group:
    """One run."""
    return Group(Text(printable(title), style="bold"), _counts(figures), _times(figures))


def _counts(figures: Mapping[str, Any]) -> Table:
    table = Table(show_header=False)
    failed = f", [red]{figures['failed']} failed[/red]" if figures["failed"] else ""
    ends = ", ".join(f"{count:,} {why}" for why, count in figures["finish_reasons"].items())
    table.add_row("requests", f"{figures['requests']:,}{failed} in {figures['wall_s']:.1f} s")
    table.add_row("finished", Text(printable(ends) or "none"))
    table.add_row("tokens in", f"{figures['input_tokens']:,}, "
                  f"{figures['cached_tokens']:,} of them cached")  # fmt: skip
    table.add_row("tokens out", f"{figures['output_tokens']:,}")
    for name, key, decimals in _RATES:
        if key in figures:
            share = f"  ({figures['goodput_share']:.0%} of requests)" if "goodput" in key else ""
            table.add_row(name, f"{figures[key]:,.{decimals}f}{share}")
    for error, count in figures["errors"].items():
        table.add_row("[red]error[/red]", Text(printable(f"{count} times: {error}")))
    return table


def _times(figures: Mapping[str, Any]) -> Table:
    table = Table("ms", *_SHOWN)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, key in _TIMES:
        told = figures[key]
        table.add_row(name, *(f"{told[each]:,.1f}" if told else "–" for each in _SHOWN))
    return table


def markdown_of(records: Sequence[Mapping[str, Any]]) -> str:
    """Several runs side by side, a column each, in GitHub's Markdown."""
    labels = [str(record["label"]).replace("|", "/") for record in records]
    lines = [_row("", labels), _row("---", ["---:"] * len(labels))]
    all_figures = [record["figures"] for record in records]
    lines.append(_row("requests (failed)", [f"{f['requests']:,} ({f['failed']})"
                                            for f in all_figures]))  # fmt: skip
    for name, key in (("tokens in", "input_tokens"), ("of them cached", "cached_tokens"),
                      ("tokens out", "output_tokens")):  # fmt: skip
        lines.append(_row(name, [f"{f[key]:,}" for f in all_figures]))
    for name, key, decimals in _RATES:
        if any(key in figures for figures in all_figures):
            lines.append(_row(name, [_told(f.get(key), decimals) for f in all_figures]))
    for name, key in _TIMES:
        for each in ("p50", "p99"):
            lines.append(_row(f"{name} {each}, ms", [_told(f[key].get(each), 1)
                                                     for f in all_figures]))  # fmt: skip
    return "\n".join(lines)


def _row(first: str, cells: Sequence[str]) -> str:
    return f"| {' | '.join([first, *cells])} |"


def _told(value: float | None, decimals: int) -> str:
    return "–" if value is None else f"{value:,.{decimals}f}"
