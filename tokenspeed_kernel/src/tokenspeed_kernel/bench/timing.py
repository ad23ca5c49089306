"""Fair timing: samples of all candidates alternate, and inputs rotate so that each call finds a cold cache.

On a GPU the calls of one sample are captured into a CUDA graph, so that what Python takes to launch them does not count. A kernel
that cannot be captured is timed with events around the same calls, and its timing says so.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from tokenspeed_kernel.testing.tensors import map_tensors, tensors_of

__all__ = ["Timing", "cache_bytes", "rotating_copies", "size_of", "time_calls"]

# More copies than this do not make the cache colder, but take long to make.
_MAX_COPIES: Final = 64
# A sample shorter than this is mostly the clock.
_SAMPLE_S: Final = 0.002
_UNKNOWN_CPU_CACHE_BYTES: Final = 64 << 20
# Memory for the copies of one call's arguments.
_COPIES_BYTES: Final = {"cpu": 1 << 30, "cuda": 16 << 30}

# Untyped in torch.
_Stream: Any = torch.cuda.Stream
_Event: Any = torch.cuda.Event


@dataclass(frozen=True, slots=True)
class Timing:
    """Time of one call in microseconds, over several samples.

    Attributes:
        best_us: smallest sample; the figure to report on a CPU that others use too.
        median_us: median sample.
        worst_us: third quartile: what three of four samples stay below.
        how: `graph` (CUDA graph replay), `events` (launched one by one) or `cpu`.
    """

    best_us: float
    median_us: float
    worst_us: float
    how: str

    @property
    def noise_us(self) -> float:
        """How far samples lie apart."""
        return self.worst_us - self.best_us

    def surely_below(self, other: Timing) -> bool:
        """Say whether this is faster by more than the noise of both: no quarter of the samples overlaps."""
        return self.worst_us < other.best_us


def size_of(value: Any) -> int:
    """Bytes of all tensors in a nested value."""
    return sum(tensor.numel() * tensor.element_size() for _, tensor in tensors_of(value))


def cache_bytes(device: torch.device) -> int:
    """Size of the device's last cache."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text(encoding="utf-8").strip()
        sizes.append(int(text.rstrip("KM")) * {"K": 1 << 10, "M": 1 << 20}.get(text[-1], 1))
    return max(sizes, default=_UNKNOWN_CPU_CACHE_BYTES)


def rotating_copies(
    arguments: dict[str, Any], device: torch.device, touched_bytes: int, *, most: int = _MAX_COPIES
) -> tuple[list[dict[str, Any]], bool]:
    """Return copies of the arguments, of which calls together touch twice the last cache; and whether they do.

    Args:
        arguments: of a call.
        device: where they are.
        touched_bytes: what one call reads and writes; less than all where an op picks rows of a table.
        most: largest number of copies.
    """
    wanted = -(-2 * cache_bytes(device) // max(touched_bytes, 1))
    fitting = _COPIES_BYTES[device.type] // max(size_of(arguments), 1)
    count = max(1, min(most, wanted, fitting))
    return [arguments, *(map_tensors(arguments, torch.Tensor.clone) for _ in range(count - 1))], count >= wanted


def time_calls(
    calls: dict[str, Callable[[int], object]], num_copies: int, device: torch.device, *, samples: int = 20
) -> dict[str, Timing | Exception]:
    """Time several functions against each other.

    Args:
        calls: by name; each takes the number of the copy to use.
        num_copies: how many copies there are.
        device: where they run.
        samples: of each.
    Returns:
        A timing for each name, or the exception that it raised.
    """
    take = _graph_sampler if device.type == "cuda" else _cpu_sampler
    samplers: dict[str, tuple[Callable[[], float], str]] = {}
    results: dict[str, Timing | Exception] = {}
    for name, call in calls.items():
        try:
            samplers[name] = take(call, num_copies)
        except Exception as error:  # noqa: BLE001 - a kernel may raise anything; the others are still timed
            results[name] = error
    taken: dict[str, list[float]] = {name: [] for name in samplers}
    for _ in range(samples):
        for name, (sample, _) in samplers.items():
            taken[name].append(sample() * 1e6)
    for name, times in taken.items():
        quartiles = statistics.quantiles(times, n=4) if len(times) > 1 else [times[0]] * 3
        results[name] = Timing(min(times), statistics.median(times), quartiles[2], samplers[name][1])
    return results


def _cpu_sampler(call: Callable[[int], object], num_copies: int) -> tuple[Callable[[], float], str]:
    call(0)
    start = time.perf_counter()
    call(num_copies - 1)
    inner = max(1, min(10_000, int(_SAMPLE_S / max(time.perf_counter() - start, 1e-9))))
    turn = itertools.cycle(range(num_copies))

    def sample() -> float:
        order = list(itertools.islice(turn, inner))
        start = time.perf_counter()
        for number in order:
            call(number)
        return (time.perf_counter() - start) / inner

    return sample, "cpu"


def _graph_sampler(call: Callable[[int], object], num_copies: int) -> tuple[Callable[[], float], str]:
    order: Sequence[int] = list(range(num_copies)) * -(-8 // num_copies)
    stream: Any = _Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for number in order:  # compiles, allocates scratch memory, and warms up
            call(number)
    torch.cuda.synchronize()
    graph: Any = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for number in order:
                call(number)
    except Exception:  # noqa: BLE001 - whatever a kernel does that a graph cannot hold
        torch.cuda.synchronize()

        def launch() -> None:
            for number in order:
                call(number)

        return lambda: _between_events(launch) / len(order), "events"
    graph.replay()
    torch.cuda.synchronize()
    return lambda: _between_events(graph.replay) / len(order), "graph"


def _between_events(work: Callable[[], None]) -> float:
    start, end = _Event(enable_timing=True), _Event(enable_timing=True)
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e-3
