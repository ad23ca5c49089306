"""What a family measures with: the device's rates, and times of ours and of the peers in one run."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from perf.graph_replay import replay_us, timed_us
from perf.harness import Benchmark, Context, Row
from perf.hopper.rows import LIMIT, Calls, Error, Family, Peer, Rates, Result, Work
from tokenspeed_kernel.dispatch import default_registry
from tokenspeed_kernel.errors import TokenSpeedKernelError
from tokenspeed_kernel.probe import request_of
from tokenspeed_kernel.selection import select

__all__ = ["Bench", "as_benchmark", "chosen", "measure_shape", "missing_device", "rates", "read_rate"]


@dataclass(frozen=True, slots=True)
class Bench:
    """What `Family.measure` is given."""

    rates: Rates
    repeats: int = 20
    quick: bool = False
    without: frozenset[str] = frozenset()
    """Peers that are not measured."""

    def measured(
        self,
        work: Work,
        ours: Calls,
        peers: Mapping[str, Peer],
        *,
        error: Error | None = None,
        solution: str = "",
        problem: str = "",
        pause_s: float = 0.0,
    ) -> Result:
        """The times of ours and of each peer.

        Args:
            work: what they do.
            ours: our calls; each is in a graph of its own kind, so it must be safe to capture.
            peers: calls of each by its name, what makes them, or why there are none. What makes them is called in turn, so that one
                peer's memory is free again before the next takes its own.
            error: how far our result is from the reference.
            solution: the kernel that was timed.
            problem: what is wrong with our result (`Error.problem`); a wrong one is not timed.
            pause_s: before each measurement, also of peers. Matrix products draw so much power that the clock falls within
                a tenth of a second: without a pause whoever comes first looks up to a tenth faster.
        """
        if problem:
            return Result.failed(work, problem, error)
        ours_us, note = self._timed(ours, pause_s)
        peers_us: dict[str, float] = {}
        absent: dict[str, str] = {}
        for name, peer in peers.items():
            if name in self.without:
                absent[name] = "left out by --without"
                continue
            try:
                calls = peer() if callable(peer) else peer
            except (ImportError, TokenSpeedKernelError, RuntimeError, OSError) as cause:
                calls = f"{type(cause).__name__}: {str(cause).splitlines()[0] if str(cause) else ''}"
            time_us, why = self._timed(calls, pause_s)
            if time_us is None:
                absent[name] = why
            else:
                peers_us[name] = time_us
            del calls
        spread_us = 0.0
        if ours_us is not None:
            again_us, note = self._timed(ours, pause_s)
            if again_us is not None:
                ours_us, spread_us = (ours_us + again_us) / 2, abs(ours_us - again_us)
        return Result(work, ours_us, spread_us, solution, peers_us, absent, error, note)

    def _timed(self, calls: Calls | str, pause_s: float) -> tuple[float | None, str]:
        if pause_s:
            torch.cuda.synchronize()
            time.sleep(pause_s)
        return timed_us(calls, self.repeats)


def chosen(op: Callable[..., Any], **arguments: Any) -> str:
    """The kernel that a public op takes for these arguments when none is named; "" where it needs none."""
    request = request_of(op, arguments)
    return "" if request is None else select(default_registry(), request).name


def missing_device() -> str:
    """Why the families cannot run here; empty where they can."""
    if not torch.cuda.is_available():
        return "needs an NVIDIA GPU of compute capability 9.0 (Hopper: H100, H200, H20, GH200); PyTorch sees no GPU here"
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) != (9, 0):
        name = torch.cuda.get_device_name()
        return f"needs a GPU of compute capability 9.0 (Hopper: H100, H200, H20, GH200); {name} has {major}.{minor}"
    return ""


def read_rate() -> float:
    """Bytes a second that the device reads: the best of several forms of a kernel that adds up 2 GiB."""
    import triton

    from perf.hopper.read_kernel import sum_kernel

    data = torch.randn(1 << 30, dtype=torch.bfloat16, device="cuda")
    sums = torch.empty(4096, device="cuda")
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    best = 0.0
    for block, programs, warps in ((4096, 4, 8), (8192, 4, 8), (4096, 8, 4), (16384, 2, 16)):
        grid, blocks = (programs * processors,), triton.cdiv(data.numel(), block)
        call = lambda grid=grid, blocks=blocks, block=block, warps=warps: sum_kernel[grid](  # noqa: E731
            data, sums, blocks, BLOCK=block, num_warps=warps
        )
        best = max(best, data.nbytes / replay_us([call], 10) * 1e6)
    return best


@functools.cache
def rates() -> Rates:
    """Measured once in a process: reads of 2 GiB, and products of 8192 cubed on random data in bf16 and in fp8."""
    a, b = torch.randn((2, 8192, 8192), device="cuda", dtype=torch.bfloat16)
    bf16_us = replay_us([lambda: a @ b] * 4, 10)
    x, y = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
    one = torch.ones((), device="cuda")
    fp8_us = replay_us([lambda: torch._scaled_mm(x, y, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)] * 4, 10)
    flops = 2 * 8192**3
    return Rates(read_rate(), flops / bf16_us * 1e6, flops / fp8_us * 1e6)


def _as_rows(result: Result, measured: Rates) -> Iterator[Row]:
    work, limit = result.work, result.work.limit_us(measured)
    share = next((goal.ratio for goal in work.goals if goal.over == (LIMIT,)), None)
    yield Row(work.case, result.ours_us, limit, "us", "limit of this run", limit, False, share, result.note)
    for name in (*result.peers_us, *result.absent):
        goal = next((goal.ratio for goal in work.goals if name in goal.over), None)
        yield Row(work.case, result.ours_us, result.peers_us.get(name), "us", name, limit, False, goal, result.absent.get(name, ""))


def measure_shape(family: Family, shape: object, bench: Bench) -> Result:
    """A shape's result; what our kernel raises is the row's note, so that the rows after it are still measured."""
    try:
        return family.measure(shape, bench)
    except (TokenSpeedKernelError, RuntimeError, OSError) as cause:
        torch.cuda.synchronize()
        text = str(cause).splitlines()
        return Result.failed(family.work(shape), f"{type(cause).__name__}: {text[0] if text else ''}")
    finally:
        torch.cuda.empty_cache()


def as_benchmark(family: Family) -> Benchmark:
    """The family as any other benchmark of `python -m perf`: one row for the limit and one for each peer."""

    def run(context: Context) -> Iterator[Row]:
        missing = missing_device()
        if missing:
            yield Row(family.summary, None, None, "us", note=missing)
            return
        bench = Bench(rates(), 5 if context.quick else 20, context.quick)
        for shape in family.shapes[:2] if context.quick else family.shapes:
            yield from _as_rows(measure_shape(family, shape, bench), bench.rates)

    return Benchmark(f"hopper.{family.name}", family.summary, run)
