"""Time and memory of the control plane as it grows: 1 to 10,000 running requests, contexts of 1K to 128K tokens, 1M cached pages.

All requests decode; nine tenths of each prompt came from the cache, which a million further pages of other conversations fill. A
step is plan, read-out of its arrays, commit, and read-out of the result. No model runs. `--set plot=FILE.png` draws the growth
(needs matplotlib).
"""

from __future__ import annotations

import gc
import importlib
import importlib.metadata
import importlib.util
import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from perf.harness import Benchmark, Context, Row
from perf.scheduler.step_time import COMMIT_ARRAYS, PLAN_ARRAYS, peer_step, prompts, sample_s
from tokenspeed_engine.scheduler import Scheduler, SchedulerConfig, SubmitStatus

PAGE_SIZE = 16
MAX_NEW_TOKENS = 512
MOST_TOKENS = 64 * 2**20  # requests x context
FAMILY = 8  # requests that share the first part of their prompts
SHARED = 0.91
CACHED_PAGES = 1_000_000
FILLER_TOKENS = 131_072
NO_STOP = np.empty(0, dtype=np.int32)
GOALS_US = {64: 50, 256: 200, 2048: 1000}
PEER_MOST_TOKENS = 2**19


def resident_bytes() -> int:
    """Physical memory of the process now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


class Load:
    """A scheduler with `num_requests` decodes of `context` tokens, most of each prompt shared, and a cache of others' pages."""

    def __init__(self, num_requests: int, context: int, cached_pages: int) -> None:
        self.num_requests, self.context, self.next_id = num_requests, context, 0
        self.source = np.random.default_rng(0)
        own_pages = num_requests * (-(-(context + MAX_NEW_TOKENS) // PAGE_SIZE) + 1)
        before = resident_bytes()
        self.scheduler = Scheduler(
            SchedulerConfig(
                num_pages=own_pages + cached_pages + FILLER_TOKENS // PAGE_SIZE + 64,
                page_size=PAGE_SIZE,
                max_num_seqs=num_requests,
                max_num_batched_tokens=max(FILLER_TOKENS, num_requests),
                max_model_len=max(context + MAX_NEW_TOKENS, FILLER_TOKENS + 1 if cached_pages else 0),
            )
        )
        for _ in range(-(-cached_pages * PAGE_SIZE // FILLER_TOKENS)):
            self.finish(self.source.integers(0, 100_000, FILLER_TOKENS, dtype=np.int32), 1)
        num_shared = int(context * SHARED)
        self.submit_s: list[float] = []
        # All that is shared first: who decodes while others are prepared would come to its end.
        families = [self.source.integers(0, 100_000, num_shared, dtype=np.int32) for _ in range(0, num_requests, FAMILY)]
        for shared in families:
            self.finish(shared, 1)
        for index in range(num_requests):
            own = self.source.integers(0, 100_000, context - num_shared, dtype=np.int32)
            prompt = np.concatenate([families[index // FAMILY], own])
            start = time.perf_counter()
            self.submit(prompt, MAX_NEW_TOKENS)
            self.submit_s.append(time.perf_counter() - start)
        while True:
            plan = self.scheduler.plan()
            self.scheduler.commit(plan.step, np.ones(plan.num_samples, dtype=np.int32))
            if plan.num_decodes == num_requests:
                break
        self.grown_bytes = resident_bytes() - before
        self.sampled = np.ones(num_requests, dtype=np.int32)

    def submit(self, prompt: np.ndarray, max_new: int) -> None:
        status = self.scheduler.submit(self.next_id, prompt, max_new, NO_STOP)
        if status != SubmitStatus.OK:
            raise RuntimeError(f"scale: expected every request to be taken, got {status}")
        self.next_id += 1

    def finish(self, prompt: np.ndarray, max_new: int) -> None:
        """Run one request to its end beside those that wait: its pages stay in the cache."""
        self.submit(prompt, max_new)
        target = self.scheduler.stats().num_finished + 1
        while self.scheduler.stats().num_finished < target:
            plan = self.scheduler.plan()
            self.scheduler.commit(plan.step, np.ones(plan.num_samples, dtype=np.int32))

    @property
    def hit_rate(self) -> float:
        """Of the prompts of those that run."""
        return int(self.context * SHARED) // PAGE_SIZE * PAGE_SIZE / self.context

    def step(self) -> None:
        """One more step, with all that an engine reads of it."""
        plan = self.scheduler.plan()
        for name in PLAN_ARRAYS:
            getattr(plan, name)
        result = self.scheduler.commit(plan.step, self.sampled)
        for name in COMMIT_ARRAYS:
            getattr(result, name)


def load_peer() -> tuple[Any, str]:
    """The peer's module and name, or None."""
    if not importlib.util.find_spec("tokenspeed_scheduler"):
        return None, ""
    return importlib.import_module("tokenspeed_scheduler"), (
        f"tokenspeed-scheduler {importlib.metadata.version('tokenspeed-scheduler')}"
    )


def measure(num_requests: int, context: int, cached_pages: int, rounds: int) -> list[Row]:
    """One size: step time and memory. In a process of its own: what an earlier size gave back would hide what this one takes."""
    peer, peer_name = load_peer()
    load = Load(num_requests, context, cached_pages)
    theirs: Callable[[], None] | None = None
    if peer is not None and num_requests * context <= PEER_MOST_TOKENS:
        theirs = peer_step(peer, num_requests, prompts(num_requests, context))
    ours: list[float] = []
    others: list[float] = []
    sample_s(load.step, 2 * PAGE_SIZE, [])
    if theirs is not None:
        sample_s(theirs, 2, [])
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            sample_s(load.step, PAGE_SIZE, ours)
            if theirs is not None:
                sample_s(theirs, 1, others)
    finally:
        gc.enable()
    stats, median_us = load.scheduler.stats(), statistics.median(ours) * 1e6
    where = f"{num_requests} decoding, {context} of context, {stats.cached_pages} cached pages"
    goal_us = next((goal for most, goal in sorted(GOALS_US.items()) if num_requests <= most), None)
    notes = [f"{median_us / num_requests:.3f} us a request", f"slowest of {len(ours)} {max(ours) * 1e6:.0f} us"]
    notes.append(f"hit rate {load.hit_rate:.0%}")
    if goal_us is not None:
        notes.append(f"goal {goal_us} us: {'met' if median_us <= goal_us else 'MISSED'}")
    step = Row(
        case=f"step, {where}",
        ours=median_us,
        peer=statistics.median(others) * 1e6 if others else None,
        unit="us",
        peer_name=peer_name if others else "",
        note=", ".join(notes),
    )
    submit_s = statistics.median(load.submit_s)
    memory = Row(
        case=f"memory, {where}",
        ours=load.grown_bytes / 2**20,
        peer=None,
        unit="MiB",
        note=f"submit {submit_s * 1e6:.0f} us a prompt, once: {submit_s * 1e9 / context:.2f} ns a token",
    )
    return [step, memory]


def draw(points: list[tuple[int, int, float]], file: str) -> None:
    """Step time over requests, one line for each context.

    Raises:
        SystemExit: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise SystemExit(f"scheduler.scale: plot={file} needs matplotlib ({error}). Fix: pip install matplotlib") from error
    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 5))
    for context in sorted({point[1] for point in points}):
        line = sorted((requests, us) for requests, tokens, us in points if tokens == context)
        axes.plot([x for x, _ in line], [y for _, y in line], marker="o", label=f"{context:,} tokens")
    axes.plot(list(GOALS_US), list(GOALS_US.values()), "kx", label="goals")
    axes.set(xscale="log", yscale="log", xlabel="running requests", ylabel="step of the control plane, us")
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=120)


def run(context: Context) -> Iterator[Row]:
    """Yield step time and memory for each size."""
    for name in ("vllm", "sglang"):
        if importlib.util.find_spec(name) is None:
            yield Row(
                case=f"peer {name}", ours=None, peer=None, unit="us", peer_name=name, note=f"{name} is not installed; no peer"
            )
    sizes = (1, 64) if context.quick else (1, 8, 64, 256, 1024, 2048, 4096, 10_000)
    contexts = (1024,) if context.quick else (1024, 8192, 32_768, 131_072)
    cached = 0 if context.quick else CACHED_PAGES
    points = []
    for num_requests in sizes:
        for tokens in contexts:
            if num_requests * tokens > MOST_TOKENS:
                continue
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                found = pool.apply(measure, (num_requests, tokens, cached, 2 if context.quick else 10))
            for row in found:
                if row.unit == "us" and row.ours is not None:
                    points.append((num_requests, tokens, row.ours))
                yield row
    if file := context.options.get("plot"):
        draw(points, file)


BENCHMARK = Benchmark(
    name="scheduler.scale",
    summary="step time and memory of the control plane: 1 to 10,000 requests, 1K to 128K of context, 1M cached pages",
    run=run,
)
