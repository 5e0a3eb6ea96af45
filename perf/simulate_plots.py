"""The simulator's figures as PNGs. matplotlib is wanted here alone of the simulator."""

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import click

Rows = Sequence[Mapping[str, Any]]

# (figure, title, whether its axis is logarithmic)
PANELS: Final = (
    ("ttft_p50_ms", "TTFT p50, ms", True),
    ("ttft_p99_ms", "TTFT p99, ms", True),
    ("itl_p99_ms", "ITL p99, ms", True),
    ("goodput_per_s", "goodput, requests/s", False),
    ("cached_share", "prompt tokens cached", False),
    ("retractions", "retractions", False),
    ("wait_p99_times_fcfs", "wait, times FCFS's, p99", True),
    ("longest_wait_times_fcfs", "longest wait, times FCFS's", True),
)
DPI: Final = 60  # small files: they lie in the repository


def plot(
    workloads: Mapping[str, Rows], sweeps: Mapping[str, Rows], folder: Path, name: str
) -> None:
    """Writes NAME_rates.png and NAME_policies.png. Raises ClickException without matplotlib."""
    pyplot = _pyplot()
    _plot_rates(pyplot, sweeps, folder / f"{name}_rates.png")
    _plot_policies(pyplot, workloads, folder / f"{name}_policies.png")


def _pyplot() -> Any:
    try:
        matplotlib = importlib.import_module("matplotlib")
    except ImportError as error:
        raise click.ClickException("plots need matplotlib: pip install 'plait[plots]'") from error
    matplotlib.use("Agg")  # files alone: there may be no screen
    return importlib.import_module("matplotlib.pyplot")


def _plot_rates(pyplot: Any, sweeps: Mapping[str, Rows], path: Path) -> None:
    figures = (("goodput_per_s", "good requests/s"), ("itl_p99_ms", "ITL p99, ms"),
               ("ttft_p99_ms", "TTFT p99, ms"))  # fmt: skip
    figure, axes = pyplot.subplots(
        len(sweeps), len(figures), figsize=(13, 4 * len(sweeps)), squeeze=False
    )
    for line, (workload, rows) in zip(axes, sweeps.items(), strict=True):
        for axis, (field, title) in zip(line, figures, strict=True):
            for setup in dict.fromkeys(row["setup"] for row in rows):
                own = [row for row in rows if row["setup"] == setup]
                x, y = [row["rate"] for row in own], [row[field] for row in own]
                axis.plot(x, y, marker="o", label=setup)
            axis.set(title=f"{workload}: {title}", xlabel="rate, times the workload's own")
            axis.set_yscale("linear" if field == "goodput_per_s" else "log")
            axis.grid(alpha=0.3)
    axes[0][0].legend(fontsize=8)
    _save(pyplot, figure, path)


def _plot_policies(pyplot: Any, workloads: Mapping[str, Rows], path: Path) -> None:
    setups = [row["setup"] for row in next(iter(workloads.values()))]
    figure, axes = pyplot.subplots(4, 2, figsize=(15, 20))
    colours = pyplot.get_cmap("tab20").colors
    for axis, (field, title, is_log) in zip(axes.flat, PANELS, strict=True):
        for index, setup in enumerate(setups):
            values = [rows[index][field] for rows in workloads.values()]
            places = [
                at + (index - len(setups) / 2) * 0.8 / len(setups) for at in range(len(values))
            ]
            axis.bar(places, values, width=0.8 / len(setups), label=setup, color=colours[index])
        axis.set_title(title)
        axis.set_yscale("log" if is_log else "linear")
        axis.set_xticks(range(len(workloads)), list(workloads), rotation=20, fontsize=8)
        axis.grid(alpha=0.3, axis="y")
    axes[0][0].legend(fontsize=7, ncols=2)
    _save(pyplot, figure, path)


def plot_tiers(rows: Rows, path: Path) -> None:
    """With a host tier and without: where prompts are found, and what that makes of latencies.

    Raises ClickException without matplotlib.
    """
    pyplot = _pyplot()
    figures = (("ttft_p50_ms", "TTFT p50, ms"), ("ttft_p99_ms", "TTFT p99, ms"),
               ("tokens_per_s", "output tokens/s"))  # fmt: skip
    figure, (hits, *axes) = pyplot.subplots(1, 1 + len(figures), figsize=(19, 4.5))
    setups = list(dict.fromkeys(row["setup"] for row in rows))
    rates = list(dict.fromkeys(row["rate"] for row in rows))
    width = 0.8 / len(setups)
    for index, (setup, colour) in enumerate(zip(setups, ("C0", "C1", "C2"), strict=False)):
        own = [row for row in rows if row["setup"] == setup]
        places = [at + (index - (len(setups) - 1) / 2) * width for at in range(len(rates))]
        from_host = [row["from_host_share"] for row in own]
        on_device = [row["cached_share"] - row["from_host_share"] for row in own]
        hits.bar(places, on_device, width, color=colour, label=f"{setup}: on the device")
        hits.bar(places, from_host, width, on_device, color=colour, alpha=0.4, hatch="//",
                 label=f"{setup}: in host memory")  # fmt: skip
        for axis, (field, _) in zip(axes, figures, strict=True):
            axis.plot(rates, [row[field] for row in own], marker="o", color=colour, label=setup)
    hits.set(title="prompt tokens found", xlabel="rate", ylim=(0, 1.5))
    hits.set_xticks(range(len(rates)), rates)
    hits.legend(fontsize=7)
    for axis, (field, title) in zip(axes, figures, strict=True):
        axis.set(title=title, xlabel="rate, times the workload's own")
        axis.set_yscale("linear" if field == "tokens_per_s" else "log")
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    _save(pyplot, figure, path)


def _save(pyplot: Any, figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=DPI)
    pyplot.close(figure)
