"""What samples come to: rates, percentiles, goodput.

throughput  output tokens over the time from the first request to the last answer's end
TTFT        from before a request is sent (or from its planned time) to its first text
ITL         between arrivals of text
TPOT        the mean time of a token after the first, of one request
goodput     requests a second that kept every target: TTFT, and TPOT under the target for ITL, as
            DistServe counts them (Zhong et al., OSDI 2024)
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from client.bench.load import Sample

PERCENTILES: Final = (50, 90, 95, 99)
_GRID: Final = (*range(0, 100, 2), 99, 99.5, 99.9, 100)  # of what plots show


@dataclass(frozen=True, slots=True)
class Targets:
    """What a user will wait for; None: for ever."""

    ttft_ms: float | None = None
    itl_ms: float | None = None

    def are_kept(self, sample: Sample) -> bool:
        ttft, tpot = _ttft_s(sample), _tpot_s(sample)
        return (
            sample.error is None
            and (self.ttft_ms is None or (ttft is not None and ttft * 1e3 <= self.ttft_ms))
            and (self.itl_ms is None or tpot is None or tpot * 1e3 <= self.itl_ms)
        )

    @property
    def are_set(self) -> bool:
        return self.ttft_ms is not None or self.itl_ms is not None


NO_TARGETS: Final = Targets()


def summarise(samples: Sequence[Sample], targets: Targets = NO_TARGETS) -> dict[str, Any]:
    """The figures of one run; times in ms, unless a name says otherwise."""
    good = [sample for sample in samples if sample.error is None]
    wall_s = max(s.ended_s for s in samples) - min(s.sent_s for s in samples)
    figures = {
        "requests": len(samples),
        "failed": len(samples) - len(good),
        "errors": dict(Counter(s.error for s in samples if s.error is not None)),
        "finish_reasons": dict(Counter(s.finish for s in good)),
        "wall_s": wall_s,
        "input_tokens": sum(s.prompt_tokens for s in good),
        "cached_tokens": sum(s.cached_tokens for s in good),
        "output_tokens": sum(s.output_tokens for s in good),
        "output_tokens_per_s": sum(s.output_tokens for s in good) / wall_s,
        "total_tokens_per_s": sum(s.prompt_tokens + s.output_tokens for s in good) / wall_s,
        "requests_per_s": len(good) / wall_s,
        **{f"{name}_ms": told(values) for name, values in _times_s(good).items()},
    }
    if targets.are_set:
        kept = sum(targets.are_kept(sample) for sample in samples)
        figures["targets"] = {"ttft_ms": targets.ttft_ms, "itl_ms": targets.itl_ms}
        figures["goodput_requests_per_s"] = kept / wall_s
        figures["goodput_share"] = kept / len(samples)
    return figures


def distributions(samples: Sequence[Sample]) -> dict[str, Any]:
    """For plots: each time's value in ms at every percentile of `grid`."""
    times = _times_s([sample for sample in samples if sample.error is None])
    told = {
        f"{name}_ms": np.percentile(np.array(values) * 1e3, _GRID).round(3).tolist()
        for name, values in times.items()
        if values
    }
    return {"grid": list(_GRID), **told}


def told(values_s: list[float]) -> dict[str, float]:
    """Mean and percentiles in ms; nothing of nothing."""
    if not values_s:
        return {}
    values_ms = np.array(values_s) * 1e3
    found = np.percentile(values_ms, PERCENTILES)
    named = {f"p{p}": float(v) for p, v in zip(PERCENTILES, found, strict=True)}
    return {"mean": float(values_ms.mean()), **named}


def _times_s(good: Sequence[Sample]) -> dict[str, list[float]]:
    return {
        "ttft": [value for s in good if (value := _ttft_s(s)) is not None],
        "itl": [gap for s in good for gap in np.diff(s.arrivals_s).tolist()],
        "tpot": [value for s in good if (value := _tpot_s(s)) is not None],
        "e2e": [s.ended_s - s.sent_s for s in good],
    }


def _ttft_s(sample: Sample) -> float | None:
    """None where no text came: a lone EOS is an answer, too."""
    return sample.arrivals_s[0] - sample.sent_s if sample.arrivals_s else None


def _tpot_s(sample: Sample) -> float | None:
    if sample.output_tokens < 2 or not sample.arrivals_s:
        return None
    return (sample.arrivals_s[-1] - sample.arrivals_s[0]) / (sample.output_tokens - 1)
