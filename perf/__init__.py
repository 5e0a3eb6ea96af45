"""Benchmarks: `python -m perf.bench_…`. Results in perf/results/, what did not help in LOG.md."""

import engine  # noqa: F401  (sets what torch reads once, before anything here loads torch)
import runtime  # noqa: F401  (puts http/ and kernels/ on the path in a bare checkout)
