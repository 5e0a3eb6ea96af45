"""What a step takes, in parts: as measured, or as learnt from a trace of real steps.

A trace is what `GET /debug/steps` of a server with `--trace-steps` tells, as it comes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from engine.step_trace import StepRecord


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Milliseconds of a step."""

    step: float  # reading the weights, launching
    decode_row: float
    kv_token: float  # of decode rows: each reads its own
    prefill_token: float
    copied_token: float = 0.0  # of a page that goes to host memory or comes back

    def of(self, decode_rows: int, kv_tokens: int, prefill_tokens: int) -> float:
        """Of a step that computes something; copies are apart, as they run beside it.

        kv_tokens  of all decode rows together
        """
        decoding = self.decode_row * decode_rows + self.kv_token * kv_tokens
        return self.step + decoding + self.prefill_token * prefill_tokens


# From perf/results/bench_step_*.json and bench_decode_graph_14B_*.json (one H200, context 600): the
# step at batch 1; keys and values at 4.1 TB/s; the rest at batch 256, a row each; prefill over all
# 142,827 tokens of the offline workload. At batch 128 this says 13.8 ms for 14B; 13.2 is measured.
# Copies: the 112 and 160 KiB of a token's keys and values at 53.5 GB/s (perf.bench_cache: 54.0 to
# host memory, 53.3 back).
COSTS: Final = {
    "0.6B": StepCosts(
        step=1.10, decode_row=0.001, kv_token=0.000028, prefill_token=0.0022, copied_token=0.0021
    ),
    "14B": StepCosts(
        step=8.40, decode_row=0.018, kv_token=0.000040, prefill_token=0.039, copied_token=0.0031
    ),
}


def read_trace(path: Path) -> list[StepRecord]:
    """Raises ValueError for a line that is no step."""
    return [StepRecord.of_json(line) for line in path.read_text().splitlines()]


def fit_costs(records: Sequence[StepRecord]) -> StepCosts:
    """The parts that explain the steps best; none is negative. Of copies a trace says nothing.

    Least squares; whatever comes out negative is left out, the most negative first.
    """
    steps = [
        (1, each.decode_rows, each.decode_kv_tokens, sum(chunk.tokens for chunk in each.chunks))
        for each in records
    ]
    took_ms = np.array([1e3 * each.took_s for each in records])
    parts = np.array(steps, np.float64)
    kept = list(range(parts.shape[1]))
    while True:
        found = np.linalg.lstsq(parts[:, kept], took_ms, rcond=None)[0]
        if (found >= 0).all():
            break
        del kept[int(np.argmin(found))]
    whole = np.zeros(parts.shape[1])
    whole[kept] = found
    return StepCosts(*whole.tolist())
