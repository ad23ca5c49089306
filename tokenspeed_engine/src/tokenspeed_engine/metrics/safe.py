"""Counters that a wrong statistic cannot break."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter

logger = logging.getLogger(__name__)


class SafeCounter:
    """A Prometheus counter that ignores negative increments and warns of them once.

    prometheus_client raises on a negative increment. In an output loop that would end users' streams for the sake of a statistic.
    """

    def __init__(self, name: str, documentation: str, registry: CollectorRegistry, labels: Sequence[str] = ()) -> None:
        self._name = name
        self._counter = Counter(name, documentation, labelnames=labels, registry=registry)
        self._warned = False

    def inc(self, amount: float = 1, **labels: str) -> None:
        """Add amount to the counter (of these label values); a negative amount adds nothing."""
        counter = self._counter.labels(**labels) if labels else self._counter
        counter.inc(self.clamp(amount))

    def clamp(self, amount: float) -> float:
        """The amount, or 0 if it is negative (or no number), with one warning for each counter."""
        if amount >= 0:
            return amount
        if not self._warned:
            self._warned = True
            logger.warning(
                "metrics.%s: expected an increment of 0 or more, got %s; counted as 0 (further ones are not reported)",
                self._name,
                amount,
            )
        return 0.0
