"""What every benchmark shares: the schema of a result, the machine's description, and fair timing.

A benchmark is a module anywhere under ``perf/`` that defines::

    BENCHMARK = Benchmark(name="kernel.dispatch", summary="...", run=run)

where ``run(context)`` yields `Row` objects. ``python -m perf`` finds, lists and runs it; nothing else has to be edited.
A peer that is not installed, or a device that is not there, is a row with ``note`` saying so, never an exception.

Measure in pairs: ours and the peer (or the limit) in the same call of ``run``, alternating, on random data.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

VERSIONED = (
    "tokenspeed-kernel",
    "tokenspeed-engine",
    "torch",
    "triton",
    "transformers",
    "numpy",
    "tokenizers",
    "tokenspeed-scheduler",
)


@dataclass(frozen=True, slots=True)
class Row:
    """One measured case.

    Attributes:
        case: what was measured, with shapes and dtypes.
        ours: our figure in ``unit``.
        peer: the peer's figure in the same run; None when there is none.
        unit: unit of ``ours`` and ``peer``, such as "us", "tok/s", "MB/s".
        peer_name: what the peer is, with its version.
        limit: the figure that the hardware allows, in ``unit``; None when it is not known.
        higher_is_better: how to read ``unit``; None guesses: rates (units with "/s") are better when higher.
        goal: the ratio that was promised for this case; None when none was.
        note: why a figure is missing, or what a reader must know.
    """

    case: str
    ours: float | None
    peer: float | None
    unit: str
    peer_name: str = ""
    limit: float | None = None
    higher_is_better: bool | None = None
    goal: float | None = None
    note: str = ""

    def _gain(self, ours: float, other: float) -> float:
        rate = self.higher_is_better if self.higher_is_better is not None else "/s" in self.unit
        return ours / other if rate else other / ours

    @property
    def ratio(self) -> float | None:
        """How many times better ours is than the peer; above 1 is better, whatever the unit."""
        return self._gain(self.ours, self.peer) if self.ours and self.peer else None

    @property
    def share_of_limit(self) -> float | None:
        """The part of the hardware's limit that ours reaches; 1.0 is all of it."""
        return self._gain(self.ours, self.limit) if self.ours and self.limit else None

    def to_json(self) -> dict[str, object]:
        """The row with its derived figures, as plain data."""
        return {**asdict(self), "ratio": self.ratio, "share_of_limit": self.share_of_limit}


@dataclass(frozen=True, slots=True)
class Context:
    """What a benchmark is told.

    Attributes:
        quick: fewer cases and repetitions, to see that it runs at all; its figures are not to be reported.
        options: ``--set key=value`` of the command line.
    """

    quick: bool = False
    options: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A named benchmark. ``run`` yields rows; it must not raise for a missing peer or device."""

    name: str
    summary: str
    run: Callable[[Context], Iterator[Row]]


def machine() -> dict[str, object]:
    """Describe the machine: processor, cores, memory, and the GPU when PyTorch sees one."""
    facts: dict[str, object] = {
        "processor": _processor_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.platform(terse=True),
        "gpu": None,
    }
    if "torch" in sys.modules or importlib.util.find_spec("torch"):
        import torch

        if torch.cuda.is_available():
            facts["gpu"] = torch.cuda.get_device_name(0)
            facts["cuda"] = torch.version.cuda
    return facts


def versions() -> dict[str, str]:
    """Versions of everything that can change a figure."""
    found = {"python": platform.python_version()}
    for name in VERSIONED:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def time_s(function: Callable[[], object], *, repeats: int = 20, min_time_s: float = 0.002) -> float:
    """Median wall time of one call on the CPU.

    Args:
        function: what to time; it must be synchronous.
        repeats: number of samples.
        min_time_s: each sample calls ``function`` often enough to last at least so long.
    Returns:
        Seconds for one call.
    """
    function()
    inner, elapsed = 1, 0.0
    while True:
        start = time.perf_counter()
        for _ in range(inner):
            function()
        elapsed = time.perf_counter() - start
        if elapsed >= min_time_s:
            break
        inner = max(inner * 2, int(inner * min_time_s / max(elapsed, 1e-9)))
    samples = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(inner):
            function()
        samples.append((time.perf_counter() - start) / inner)
    return statistics.median(samples)


def time_pair_s(
    ours: Callable[[], object], peer: Callable[[], object], *, repeats: int = 20, min_time_s: float = 0.002
) -> tuple[float, float]:
    """Median wall times of two functions whose samples alternate, so that a noisy neighbour hits both.

    Returns:
        (ours, peer) in seconds for one call.
    """
    counts = []
    for function in (ours, peer):
        function()
        start = time.perf_counter()
        function()
        counts.append(max(1, int(min_time_s / max(time.perf_counter() - start, 1e-9))))
    samples: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        for index, function in enumerate((ours, peer)):
            start = time.perf_counter()
            for _ in range(counts[index]):
                function()
            samples[index].append((time.perf_counter() - start) / counts[index])
    return statistics.median(samples[0]), statistics.median(samples[1])


def _processor_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
