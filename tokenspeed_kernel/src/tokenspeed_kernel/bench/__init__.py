"""Benchmark of kernels: time on a cold cache, and the share of what the device was measured to allow."""

from tokenspeed_kernel.bench.limits import Limits, measure_limits
from tokenspeed_kernel.bench.measure import BenchOptions, Row, bench
from tokenspeed_kernel.bench.timing import Timing

__all__ = ["BenchOptions", "Limits", "Row", "Timing", "bench", "measure_limits"]
