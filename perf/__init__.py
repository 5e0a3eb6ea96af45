"""Benchmarks: `python -m perf.bench_…`. Results go to perf/results/, what did not help to LOG.md."""

import runtime  # noqa: F401  (puts http/ and kernels/ on the path in a bare checkout)
