"""Counters and request statistics."""

from tokenspeed_engine.metrics.engine import EngineMetrics, RequestRecord
from tokenspeed_engine.metrics.safe import SafeCounter

__all__ = ["EngineMetrics", "RequestRecord", "SafeCounter"]
