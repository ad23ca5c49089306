"""Times calls on a CUDA device without the host's share: by replays of a CUDA graph."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

from tokenspeed_kernel.errors import TokenSpeedKernelError

__all__ = ["device_rates", "replay_us", "timed_us"]


def replay_us(calls: Sequence[Callable[[], object]], repeats: int = 20) -> float:
    """Median time of one call when a CUDA graph holds all of them in turn."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in (*calls, *calls):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    for _ in range(3):
        graph.replay()
    samples = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(samples)


def timed_us(calls: Sequence[Callable[[], object]] | str, repeats: int) -> tuple[float | None, str]:
    """The time, or None and why there is none: a library that lacks the call, or memory; a text is passed on as the reason."""
    if isinstance(calls, str):
        return None, calls
    try:
        return replay_us(calls, repeats), ""
    except (TokenSpeedKernelError, RuntimeError, OSError) as error:
        torch.cuda.synchronize()
        return None, f"{type(error).__name__}: {str(error).splitlines()[0]}"


def device_rates() -> tuple[float, float]:
    """Measured (bytes read a second, bf16 operations a second)."""
    buffers = torch.randn((4, 64 << 20), device="cuda")
    read_us = replay_us([lambda row=row: row.sum() for row in buffers], 10)
    a, b = torch.randn((2, 8192, 8192), device="cuda", dtype=torch.bfloat16)
    product_us = replay_us([lambda: a @ b] * 4, 10)
    return buffers[0].nbytes / read_us * 1e6, 2 * 8192**3 / product_us * 1e6
