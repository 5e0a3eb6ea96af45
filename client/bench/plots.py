"""Several runs as pictures. matplotlib is wanted by nothing else, so that it may be missing."""

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

_TIMES: Final = (("TTFT", "ttft_ms"), ("ITL", "itl_ms"), ("end to end", "e2e_ms"))
_RATES: Final = (
    ("output tokens/s", "output_tokens_per_s"),
    ("requests/s", "requests_per_s"),
    ("goodput, requests/s", "goodput_requests_per_s"),
)


class NoMatplotlib(Exception):
    """Pictures are asked for where matplotlib is not installed."""


def draw(records: Sequence[Mapping[str, Any]], folder: Path) -> list[Path]:
    """Writes latency.png and throughput.png; their paths. Raises NoMatplotlib."""
    pyplot = _pyplot()
    folder.mkdir(parents=True, exist_ok=True)
    return [_latency(pyplot, records, folder), _throughput(pyplot, records, folder)]


def _pyplot() -> Any:
    try:
        matplotlib = importlib.import_module("matplotlib")
    except ImportError as error:
        raise NoMatplotlib(
            "plots need matplotlib: pip install 'plait[plots]'; in a clone, `./plait run true` "
            "installs it"
        ) from error
    matplotlib.use("Agg")  # files alone: there may be no screen
    return importlib.import_module("matplotlib.pyplot")


def _latency(pyplot: Any, records: Sequence[Mapping[str, Any]], folder: Path) -> Path:
    """How much of a run was faster than what: one curve a run."""
    ticker = importlib.import_module("matplotlib.ticker")
    figure, axes = pyplot.subplots(1, len(_TIMES), figsize=(12, 3.6), layout="constrained")
    for axis, (name, key) in zip(axes, _TIMES, strict=True):
        for record in records:
            drawn = record["distributions"]
            if key in drawn:
                axis.plot(drawn[key], drawn["grid"], label=record["label"])
        axis.set(title=name, xlabel="ms", ylim=(0, 100))
        axis.set_xscale("log", subs=[])
        axis.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5), numticks=9))
        axis.xaxis.set_major_formatter("{x:,g}")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("% of values below")
    if axes[0].lines:
        axes[-1].legend(*axes[0].get_legend_handles_labels(), loc="lower right", fontsize="small")
    return _save(pyplot, figure, folder / "latency.png")


def _throughput(pyplot: Any, records: Sequence[Mapping[str, Any]], folder: Path) -> Path:
    rates = [(name, key) for name, key in _RATES if any(key in r["figures"] for r in records)]
    height = 1.2 + 0.4 * len(records)
    figure, axes = pyplot.subplots(1, len(rates), figsize=(12, height), layout="constrained")
    labels = [record["label"] for record in records]
    for index, (axis, (name, key)) in enumerate(zip(axes, rates, strict=True)):
        values = [record["figures"].get(key) for record in records]
        colours = [f"C{number}" for number in range(len(records))]
        bars = axis.barh(range(len(records)), [value or 0.0 for value in values], color=colours)
        told = ["not asked for" if value is None else f"{value:,.4g}" for value in values]
        axis.bar_label(bars, told, padding=3)
        axis.set_yticks(range(len(records)), labels if index == 0 else [""] * len(labels))
        axis.invert_yaxis()
        axis.margins(x=0.25)
        axis.set_title(name)
    return _save(pyplot, figure, folder / "throughput.png")


def _save(pyplot: Any, figure: Any, path: Path) -> Path:
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path
