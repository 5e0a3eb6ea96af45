"""Scheduling policies under uneven traffic, on a virtual clock: no device, no model.

    python -m perf.simulate --requests 400

The real scheduler, pages and radix tree, with the step times of a model as measured on an H200.
"Mini-SGLang's rules" are perf/simulate_baseline.py: prefill first, and whole allowances reserved,
with prompts in chunks of its default size and of ours.
"""

from dataclasses import dataclass
from typing import Any, Final

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from engine.cache_factory import build_prefix_cache
from engine.config import SCHEDULE_POLICIES
from engine.pages import PagePool
from engine.scheduler import Scheduler
from perf.results import save
from perf.simulate_baseline import PrefillFirst
from perf.simulate_clock import COSTS, StepCosts, Trace, run
from perf.simulate_traffic import EOS, WORKLOADS, Traffic

PAGE_SIZE: Final = 64
MAX_MODEL_LEN: Final = 16_384
GOOD_TTFT_S, GOOD_ITL_S = 2.0, 0.05  # of a request that counts as served well


@dataclass(frozen=True, slots=True)
class Setup:
    """One way to schedule."""

    name: str
    scheduler: type[Scheduler] = Scheduler
    prefill_budget: int = 2048
    policy: str = "fcfs"
    preemption_threshold: int | None = None
    target_itl_ms: float | None = None

    def build(self, kv_tokens: int) -> Scheduler:
        return self.scheduler(
            pool=PagePool(1 + kv_tokens // PAGE_SIZE),
            cache=build_prefix_cache("radix", PAGE_SIZE),
            max_running=256,
            max_model_len=min(MAX_MODEL_LEN, kv_tokens),
            prefill_budget=self.prefill_budget,
            eos_ids=(EOS,),
            vocab_size=0,
            policy=self.policy,
            preemption_threshold=self.preemption_threshold,
            target_itl_s=None if self.target_itl_ms is None else self.target_itl_ms / 1e3,
        )


SETUPS: Final = (
    Setup("Mini-SGLang's rules, 8192", PrefillFirst, 8192),
    Setup("Mini-SGLang's rules, 2048", PrefillFirst, 2048),
    *(Setup(policy, policy=policy) for policy in SCHEDULE_POLICIES),
    Setup("priority, pre-emption at 1", policy="priority", preemption_threshold=1),
    *(Setup(f"fcfs, target {target} ms", target_itl_ms=target) for target in (50, 30)),
    Setup("lpm, target 50 ms", policy="lpm", target_itl_ms=50),
)


def simulate(setup: Setup, traffic: Traffic, costs: StepCosts) -> dict[str, Any]:
    """The figures of one run."""
    scheduler = setup.build(traffic.kv_tokens)
    trace = run(scheduler, traffic, costs)
    scheduler.check_integrity()
    return {"setup": setup.name, **figures(traffic, trace)}


def figures(traffic: Traffic, trace: Trace) -> dict[str, Any]:
    """Latencies in milliseconds, throughput in output tokens a second, shares of one."""
    ttft_s, itl_s, good = [], [], 0
    for request in traffic.requests:
        times = trace.token_s[request.id]
        assert len(times) == min(traffic.lengths[request.id], request.params.max_new_tokens)
        gaps = np.diff(times)
        ttft_s.append(times[0] - request.arrived_s)
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
        "retractions": trace.retractions,
        "steps": trace.steps,
    }


@click.command()
@click.option("--requests", default=400, help="Requests of each workload.")
@click.option("--model", default="14B", type=click.Choice([*COSTS]), help="Whose step times.")
@click.option("--seed", default=0)
@click.option("--workload", "only", type=click.Choice([*WORKLOADS]), help="One of them alone.")
def main(requests: int, model: str, seed: int, only: str | None) -> None:
    console, results = Console(), {}
    for name in [only] if only else WORKLOADS:
        traffic = WORKLOADS[name](seed, requests)
        rows = [simulate(setup, traffic, COSTS[model]) for setup in SETUPS]
        console.print(_table(name, rows))
        results[name] = rows
    settings = {"requests": requests, "model": model, "seed": seed}
    print(save("simulate", {**settings, "workloads": results}))


def _table(title: str, rows: list[dict[str, Any]]) -> Table:
    table = Table("", "TTFT p50", "p99", "ITL p50", "p99", "max ms", "tokens/s", "good/s", "cached",
                  "retracted", title=title)  # fmt: skip
    for row in rows:
        names = ("ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms", "itl_max_ms")
        table.add_row(
            row["setup"],
            *(f"{row[name]:,.0f}" for name in (*names, "tokens_per_s")),
            f"{row['goodput_per_s']:.2f}",
            f"{row['cached_share']:.0%}",
            str(row["retractions"]),
        )
    return table


if __name__ == "__main__":
    main()
