"""What a server says itself of its times during a run: means, by its metrics before and after.

Of servers that have vLLM's names for them, as ours has. Whatever else they answered at the time is
in the means, too. Knows no samples.
"""

import re
from typing import Final

from client.target import NoServer, Target, ask_text

_NAMES: Final = {
    "ttft": "vllm:time_to_first_token_seconds",
    "itl": "vllm:inter_token_latency_seconds",
}
_TOTAL: Final = re.compile(
    rf"^({'|'.join(_NAMES.values())})_(sum|count)(?:{{[^}}]*}})? (\S+)", re.MULTILINE
)

Totals = dict[tuple[str, str], float]  # of (metric, sum or count), over all labels


def read_totals(target: Target) -> Totals:
    """Empty where the server tells none."""
    totals: Totals = {}
    try:
        for name, kind, value in _TOTAL.findall(ask_text(target.url, "/metrics", target.key)):
            totals[name, kind] = totals.get((name, kind), 0.0) + float(value)
    except (NoServer, ValueError):
        return {}
    return totals


def means_ms(before: Totals, after: Totals) -> dict[str, float]:
    """Of what happened between; nothing of what did not."""
    means = {}
    for short, name in _NAMES.items():
        count, total_s = (
            after.get((name, kind), 0.0) - before.get((name, kind), 0.0)
            for kind in ("count", "sum")
        )
        if count > 0:
            means[short] = total_s / count * 1e3
    return means


def told(means: dict[str, float]) -> str:
    """For people."""
    each = ", ".join(f"{name.upper()} {value:,.1f}" for name, value in means.items())
    return f"the server's own means, ms: {each}"
