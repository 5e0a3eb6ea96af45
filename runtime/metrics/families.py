"""From numbers to Prometheus' families: each under its own name and, where vLLM has the same, under
vLLM's too, so that dashboards and autoscalers made for it work.

Names and meanings of `vllm:…` are those of vLLM's own documentation of its metrics (v1).
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Final

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

from runtime.metrics.histogram import Histogram

Labels = Mapping[str, str]
Labelled = Iterable[tuple[Labels, float]]

_NO_LABELS: Final[Labels] = {}


class Families:
    """Families of one scrape. Owned by the thread that scrapes."""

    def __init__(self, model: str | None) -> None:
        """model  the label `model_name` of vLLM's names; None: not known yet"""
        self._metrics: list[Metric] = []
        self._theirs: Labels = {"model_name": model or "", "engine": "0"}

    def __iter__(self) -> Iterator[Metric]:
        return iter(self._metrics)

    def gauge(self, name: str, help: str, value: float | None, *, vllm: str = "") -> None:
        """One value; nothing where it is None."""
        if value is not None:
            self.gauges(name, help, [(_NO_LABELS, value)], vllm=vllm)

    def gauges(self, name: str, help: str, values: Labelled, *, vllm: str = "") -> None:
        """A value for each set of labels."""
        told = list(values)
        self._add(GaugeMetricFamily, f"plait_{name}", help, _NO_LABELS, told)
        if vllm:
            self._add(GaugeMetricFamily, f"vllm:{vllm}", help, self._theirs, told)

    def counter(self, name: str, help: str, value: float, *, vllm: str = "") -> None:
        self.counters(name, help, [(_NO_LABELS, value)], vllm=vllm)

    def counters(self, name: str, help: str, values: Labelled, *, vllm: str = "") -> None:
        told = list(values)
        self._add(CounterMetricFamily, f"plait_{name}", help, _NO_LABELS, told)
        if vllm:
            self._add(CounterMetricFamily, f"vllm:{vllm}", help, self._theirs, told)

    def theirs_counter(self, vllm: str, help: str, value: float) -> None:
        """Under vLLM's name alone: its labels differ from ours."""
        self.theirs_counters(vllm, help, [(_NO_LABELS, value)])

    def theirs_counters(self, vllm: str, help: str, values: Labelled) -> None:
        self._add(CounterMetricFamily, f"vllm:{vllm}", help, self._theirs, list(values))

    def histogram(self, name: str, help: str, of: Histogram, *, vllm: str = "") -> None:
        counts = list(of.counts)
        for full_name, labels in ((f"plait_{name}", _NO_LABELS), (f"vllm:{vllm}", self._theirs)):
            if vllm or labels is _NO_LABELS:
                family = HistogramMetricFamily(full_name, help, labels=list(labels))
                sums = [*accumulate(counts)]
                ends = [*map(_end, of.bounds), "+Inf"]
                family.add_metric(
                    list(labels.values()), list(zip(ends, sums, strict=True)), of.total
                )
                self._metrics.append(family)

    def info(self, name: str, help: str, facts: Labels) -> None:
        """A constant 1 whose labels are the facts."""
        self._metrics.append(InfoMetricFamily(f"plait_{name}", help, value=dict(facts)))

    def _add(
        self,
        kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        help: str,
        common: Labels,
        values: list[tuple[Labels, float]],
    ) -> None:
        names = [*common, *(values[0][0] if values else _NO_LABELS)]
        family = kind(name, help, labels=names)
        for labels, value in values:
            family.add_metric([*common.values(), *labels.values()], value)
        self._metrics.append(family)


def _end(bound: float) -> str:
    """A bucket's end as Prometheus' clients write it: 1 is 1.0."""
    return repr(float(bound))
