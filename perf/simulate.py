"""Scheduling policies under uneven traffic, on a virtual clock: no device, no model.

    python -m perf.simulate --requests 300 --plots
    python -m perf.simulate --workload "giant prompts" --trace steps.jsonl    # why steps were so
    python -m perf.simulate --costs steps.jsonl        # with step times as in a server's trace

The real scheduler, pages and radix tree, with the step times of a model as measured on an H200.
"Mini-SGLang's rules" are perf/simulate_baseline.py: prefill first, and whole allowances reserved,
with prompts in chunks of its default size and of ours. All others keep the target ITL that is the
default on a GPU, where they do not say another. The JSON says which goals were reached.

    python -m perf.simulate --host-tier --plots

Chats whose pool holds a tenth of what comes back to it, without a host tier and with one: prompt
tokens found on the device and in host memory, times to the first token, throughput. Copies take the
time that perf/simulate_costs.py says. This has a file of its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

import click
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from engine.cache_factory import HostMemory, build_prefix_cache
from engine.config import SCHEDULE_POLICIES, TARGET_ITL_MS
from engine.pages import PagePool
from engine.scheduler import Scheduler
from perf.results import FOLDER, save
from perf.simulate_baseline import PrefillFirst
from perf.simulate_clock import Trace, run
from perf.simulate_costs import COSTS, StepCosts, fit_costs, read_trace
from perf.simulate_goals import goals_of
from perf.simulate_plots import plot, plot_tiers
from perf.simulate_sessions import (
    agent_sessions,
    cache_thrashing,
    giant_prompts,
    many_tiny,
    parked_chats,
    priority_abuse,
)
from perf.simulate_traffic import (
    EOS,
    Traffic,
    bursty_chat,
    long_among_short,
    memory_short,
    shared_prompts,
    short_alone,
)

PAGE_SIZE: Final = 64
MAX_MODEL_LEN: Final = 16_384
GOOD_TTFT_S, GOOD_ITL_S = 2.0, 0.05  # of a request that counts as served well
RATES: Final = (0.5, 1.0, 1.5, 2.0, 2.5)  # times the workload's own
TRACED: Final = 1_000_000  # steps kept of a run that is traced
WORKLOADS: Final[dict[str, Callable[[int, int], Traffic]]] = {
    "bursty chat": bursty_chat,
    "long among short": long_among_short,
    "short alone": short_alone,
    "shared prompts": shared_prompts,
    "agent sessions": agent_sessions,
    "memory short": memory_short,
    "cache thrashing": cache_thrashing,
    "giant prompts": giant_prompts,
    "many tiny": many_tiny,
    "priority abuse": priority_abuse,
}
HOST_TIMES: Final = 10  # how many times the pool's tokens a host tier holds
COPIES_A_STEP: Final = 12  # pages: engine.limits.COPIED_BYTES_A_STEP of 14B's


@dataclass(frozen=True, slots=True)
class Setup:
    """One way to schedule."""

    name: str
    scheduler: type[Scheduler] = Scheduler
    prefill_budget: int = 2048
    policy: str = "fcfs"
    preemption_threshold: int | None = None
    target_itl_ms: float | None = TARGET_ITL_MS
    host: Literal["through", "back"] | None = None  # how a host tier is written; None: none is

    def build(self, kv_tokens: int, trace_steps: int = 0) -> Scheduler:
        pages, host = kv_tokens // PAGE_SIZE, None
        if self.host is not None:
            host = HostMemory(1 + HOST_TIMES * pages, self.host, COPIES_A_STEP)
        return self.scheduler(
            pool=PagePool(1 + pages),
            cache=build_prefix_cache("radix", PAGE_SIZE, "lru", host),
            max_running=256,
            max_model_len=min(MAX_MODEL_LEN, kv_tokens),
            prefill_budget=self.prefill_budget,
            eos_ids=(EOS,),
            vocab_size=0,
            policy=self.policy,
            preemption_threshold=self.preemption_threshold,
            target_itl_s=None if self.target_itl_ms is None else self.target_itl_ms / 1e3,
            trace_steps=trace_steps,
        )


BASELINE: Final = Setup("Mini-SGLang's rules, 8192", PrefillFirst, 8192, target_itl_ms=None)
DEFAULT: Final = Setup("fcfs")
SETUPS: Final = (
    BASELINE,
    Setup("Mini-SGLang's rules, 2048", PrefillFirst, 2048, target_itl_ms=None),
    *(Setup(policy, policy=policy) for policy in SCHEDULE_POLICIES),
    Setup("priority, pre-emption at 1", policy="priority", preemption_threshold=1),
    Setup("fcfs, no target", target_itl_ms=None),
    Setup("fcfs, target 30 ms", target_itl_ms=30),
)
CHAT_SETUPS: Final = (
    BASELINE,
    DEFAULT,
    Setup("short-first", policy="short-first"),
    Setup("fcfs, no target", target_itl_ms=None),
)
HOST_SETUPS: Final = (
    DEFAULT,
    Setup("fcfs, host tier written through", host="through"),
    Setup("fcfs, host tier written back", host="back"),
)
SWEPT: Final = ("long among short", "bursty chat")


def simulate(
    setup: Setup, traffic: Traffic, costs: StepCosts, trace_file: Path | None = None
) -> dict[str, Any]:
    """The figures of one run, and each request's TTFT in seconds under `waits_s`.

    trace_file  where to write why each step was as it was
    """
    scheduler = setup.build(traffic.kv_tokens, TRACED if trace_file else 0)
    trace = run(scheduler, traffic, costs)
    scheduler.check_integrity()
    if trace_file is not None and scheduler.trace is not None:
        steps = scheduler.trace.last(TRACED)
        trace_file.write_text("".join(f"{step.as_json()}\n" for step in steps))
    return {"setup": setup.name, **figures(traffic, trace)}


def figures(traffic: Traffic, trace: Trace) -> dict[str, Any]:
    """Latencies in milliseconds, throughput in output tokens a second, shares of one."""
    ttft_s, itl_s, good = [], [], 0
    for request in traffic.requests:
        times = trace.token_s[request.id]
        assert len(times) == min(traffic.lengths[request.id], request.params.max_new_tokens)
        gaps = np.diff(times)
        ttft_s.append(times[0] - trace.arrived_s[request.id])
        itl_s.append(gaps)
        is_smooth = not len(gaps) or np.quantile(gaps, 0.99) <= GOOD_ITL_S
        good += bool(ttft_s[-1] <= GOOD_TTFT_S and is_smooth)
    gaps = np.concatenate(itl_s)
    prompt_tokens = sum(len(request.prompt_ids) for request in traffic.requests)
    return {
        "ttft_p50_ms": 1e3 * float(np.quantile(ttft_s, 0.5)),
        "ttft_p99_ms": 1e3 * float(np.quantile(ttft_s, 0.99)),
        "itl_p50_ms": 1e3 * float(np.quantile(gaps, 0.5)),
        "itl_p99_ms": 1e3 * float(np.quantile(gaps, 0.99)),
        "itl_max_ms": 1e3 * float(gaps.max()),
        "tokens_per_s": sum(map(len, trace.token_s.values())) / trace.end_s,
        "goodput_per_s": good / trace.end_s,
        "cached_share": sum(trace.cached_tokens.values()) / prompt_tokens,
        "from_host_share": sum(trace.host_tokens.values()) / prompt_tokens,
        "retractions": trace.retractions,
        "steps": trace.steps,
        "waits_s": ttft_s,
    }


def add_fairness(rows: Sequence[dict[str, Any]], floor_s: float = 1.0) -> None:
    """Replaces each row's waits by how they compare with those of the same requests under FCFS.

    floor_s  shorter waits count as so long: nobody minds 10 ms that were 1
    """
    fcfs_s = np.array(next(row["waits_s"] for row in rows if row["setup"] == DEFAULT.name))
    for row in rows:
        waits_s = np.array(row.pop("waits_s"))
        times = np.maximum(waits_s, floor_s) / np.maximum(fcfs_s, floor_s)
        row["wait_p99_times_fcfs"] = float(np.quantile(times, 0.99))
        row["wait_max_times_fcfs"] = float(times.max())
        longest_s = max(waits_s.max(), floor_s)
        row["longest_wait_times_fcfs"] = float(longest_s / max(fcfs_s.max(), floor_s))


def sweep(
    make: Callable[[int, int], Traffic], setups: Sequence[Setup], seed: int, requests: int,
    costs: StepCosts,
) -> list[dict[str, Any]]:  # fmt: skip
    """Figures of the setups at each rate of a workload."""
    rows = []
    for rate in RATES:
        traffic = make(seed, requests).faster(rate)
        for setup in setups:
            row = {"rate": rate, **simulate(setup, traffic, costs)}
            del row["waits_s"]
            rows.append(row)
    return rows


@click.command()
@click.option("--requests", default=300, help="Requests of each workload.")
@click.option("--model", default="14B", type=click.Choice([*COSTS]), help="Whose step times.")
@click.option("--costs", "steps_file", type=click.Path(path_type=Path, exists=True),
              help="A trace to learn step times from, instead.")  # fmt: skip
@click.option("--seed", default=0)
@click.option("--workload", "only", type=click.Choice([*WORKLOADS]), help="One of them alone.")
@click.option("--trace", "trace_file", type=click.Path(path_type=Path),
              help="Write why each step was so: of the default's run of --workload.")  # fmt: skip
@click.option("--host-tier", is_flag=True, help="Only what a host tier saves, at several rates.")
@click.option("--plots", is_flag=True, help="PNGs beside the JSON; needs matplotlib.")
def main(
    requests: int, model: str, steps_file: Path | None, seed: int, only: str | None,
    trace_file: Path | None, host_tier: bool, plots: bool,
) -> None:  # fmt: skip
    console, results = Console(width=150), {}
    costs = COSTS[model]
    if steps_file is not None:
        fitted = fit_costs(read_trace(steps_file))
        costs = replace(fitted, copied_token=costs.copied_token)
    settings: dict[str, Any] = {"requests": requests, "model": model, "seed": seed}
    if host_tier:
        rows = sweep(parked_chats, HOST_SETUPS, seed, requests, costs)
        console.print(_tiers_table(rows))
        print(save(f"simulate_{model}_host_tier", {**settings, "parked chats": rows}))
        if plots:
            plot_tiers(rows, FOLDER / f"simulate_{model}_host_tier.png")
        return
    if trace_file is not None:
        if only is None:
            raise click.UsageError("--trace needs a --workload")
        simulate(DEFAULT, WORKLOADS[only](seed, requests), costs, trace_file)
    for name in [only] if only else WORKLOADS:
        traffic = WORKLOADS[name](seed, requests)
        rows = [simulate(setup, traffic, costs) for setup in track(SETUPS, name)]
        add_fairness(rows)
        console.print(_table(name, rows))
        results[name] = rows
    if only is not None:
        return
    sweeps = {
        name: sweep(WORKLOADS[name], CHAT_SETUPS, seed, requests, costs)
        for name in track(SWEPT, "rates")
    }
    goals = goals_of(results, sweeps, baseline=BASELINE.name, default=DEFAULT.name)
    console.print(goals)
    figures = {**settings, "goals": goals, "workloads": results, "rates": sweeps}
    print(save(f"simulate_{model}", figures))
    if plots:
        plot(results, sweeps, FOLDER, f"simulate_{model}")
    if not all(goal["reached"] for goal in goals.values()):
        raise SystemExit(1)


def _table(title: str, rows: list[dict[str, Any]]) -> Table:
    table = Table("", "TTFT p50", "p99", "ITL p50", "p99", "max ms", "tokens/s", "good/s", "cached",
                  "retracted", "wait/FCFS p99", "max", title=title)  # fmt: skip
    for row in rows:
        names = ("ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms", "itl_max_ms")
        table.add_row(
            row["setup"],
            *(f"{row[name]:,.0f}" for name in (*names, "tokens_per_s")),
            f"{row['goodput_per_s']:.2f}",
            f"{row['cached_share']:.0%}",
            str(row["retractions"]),
            f"{row['wait_p99_times_fcfs']:.1f}",
            f"{row['wait_max_times_fcfs']:.1f}",
        )
    return table


def _tiers_table(rows: list[dict[str, Any]]) -> Table:
    table = Table("rate", "", "TTFT p50", "p99", "tokens/s", "good/s", "on device", "in host",
                  title="parked chats")  # fmt: skip
    for row in rows:
        names = ("ttft_p50_ms", "ttft_p99_ms", "tokens_per_s")
        table.add_row(
            str(row["rate"]),
            row["setup"],
            *(f"{row[name]:,.0f}" for name in names),
            f"{row['goodput_per_s']:.2f}",
            f"{row['cached_share'] - row['from_host_share']:.0%}",
            f"{row['from_host_share']:.0%}",
        )
    return table


if __name__ == "__main__":
    main()
