"""What scheduling has to reach in the simulator, and whether it did.

Knows figures alone, as perf/simulate.py makes them.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

Rows = Sequence[Mapping[str, Any]]

BROKEN_ITL_MS: Final = 200.0  # p99 of the baseline, at the load where it is compared
GOODPUT_TIMES: Final = 1.5  # the baseline's, at least
ITL_TIMES: Final = 2.0  # at most: of decode's p99 without the long prompts
WAIT_TIMES: Final = 3.0  # the longest wait under FCFS, at most, under any policy
THROUGHPUT_TIMES: Final = 0.99  # of that without a target, at least, where nobody is hurt


def goals_of(
    workloads: Mapping[str, Rows], sweeps: Mapping[str, Rows], *, baseline: str, default: str
) -> dict[str, dict[str, Any]]:
    """Each goal with its figure, its limit and whether it was reached."""
    return {
        "goodput where the baseline's ITL breaks": _goodput(sweeps, baseline, default),
        "ITL beside a long prompt each second": _interference(workloads, default),
        "nobody starves": _starvation(workloads, (baseline, "Mini-SGLang's rules, 2048")),
        "no throughput lost where nobody is hurt": _throughput(workloads, default),
    }


def _goodput(sweeps: Mapping[str, Rows], baseline: str, default: str) -> dict[str, Any]:
    rows = sweeps["long among short"]
    broken = [row for row in rows if row["setup"] == baseline and row["itl_p99_ms"] > BROKEN_ITL_MS]
    if not broken:
        return {"reached": False, "why": "the baseline's p99 ITL is below at every rate"}
    theirs = broken[0]
    ours = next(r for r in rows if r["setup"] == default and r["rate"] == theirs["rate"])
    times = ours["goodput_per_s"] / max(theirs["goodput_per_s"], 1e-9)
    return {
        "reached": times >= GOODPUT_TIMES, "times": times, "limit": GOODPUT_TIMES,
        "rate": theirs["rate"], "baseline_itl_p99_ms": theirs["itl_p99_ms"],
        "baseline_per_s": theirs["goodput_per_s"], "ours_per_s": ours["goodput_per_s"],
    }  # fmt: skip


def _interference(workloads: Mapping[str, Rows], default: str) -> dict[str, Any]:
    with_ms, without_ms = (
        _row(workloads[name], default)["itl_p99_ms"] for name in ("long among short", "short alone")
    )
    times = with_ms / without_ms
    return {
        "reached": times <= ITL_TIMES, "times": times, "limit": ITL_TIMES,
        "with_ms": with_ms, "without_ms": without_ms,
    }  # fmt: skip


def _starvation(workloads: Mapping[str, Rows], others: Sequence[str]) -> dict[str, Any]:
    waits = [
        (row["longest_wait_times_fcfs"], row["setup"], name)
        for name, rows in workloads.items()
        for row in rows
        if row["setup"] not in others
    ]
    times, setup, workload = max(waits)
    return {
        "reached": times <= WAIT_TIMES, "times": times, "limit": WAIT_TIMES,
        "setup": setup, "workload": workload,
    }  # fmt: skip


def _throughput(workloads: Mapping[str, Rows], default: str) -> dict[str, Any]:
    """Nobody is hurt where without a target, too, the p99 ITL is below what counts as good."""
    shares = {}
    for name, rows in workloads.items():
        without = _row(rows, f"{default}, no target")
        if without["itl_p99_ms"] <= 50:
            shares[name] = _row(rows, default)["tokens_per_s"] / without["tokens_per_s"]
    least = min(shares.values(), default=0.0)
    return {"reached": least >= THROUGHPUT_TIMES, "least": least, "limit": THROUGHPUT_TIMES,
            "shares": shares}  # fmt: skip


def _row(rows: Rows, setup: str) -> Mapping[str, Any]:
    return next(row for row in rows if row["setup"] == setup)
