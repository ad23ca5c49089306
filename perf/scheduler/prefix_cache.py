"""What a full prefix cache costs: the time to admit, publish and evict, as the number of cached pages grows to a million.

Nothing may grow with the number of cached pages but by the depth of an ordered index. The pool is full:
every prompt is new and evicts as many pages as it has, or comes again and is found whole. No model runs.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterator

import numpy as np

from perf.harness import Benchmark, Context, Row
from tokenspeed_engine.scheduler import Scheduler, SchedulerConfig, SubmitStatus

PROMPT_PAGES = 64
PAGE_SIZE = 16
SAMPLES = 400
SEQS = 4
NO_STOP = np.empty(0, dtype=np.int32)


class Cache:
    """A scheduler whose pool is full of cached prompts of PROMPT_PAGES pages each."""

    def __init__(self, num_pages: int) -> None:
        tokens = PROMPT_PAGES * PAGE_SIZE
        self.scheduler = Scheduler(
            SchedulerConfig(
                num_pages=num_pages,
                page_size=PAGE_SIZE,
                max_num_seqs=SEQS,
                max_num_batched_tokens=2 * tokens,
                max_model_len=tokens + 2,
            )
        )
        self.random = np.random.default_rng(0)
        self.next_id = 0
        self.recent: list[np.ndarray] = []
        while self.scheduler.stats().num_evicted_pages == 0:
            self.run(self.new_prompt())

    def new_prompt(self) -> np.ndarray:
        """A prompt that nobody had before; its last token lies outside the last whole page."""
        return self.random.integers(0, 100_000, PROMPT_PAGES * PAGE_SIZE + 1, dtype=np.int32)

    def run(self, prompt: np.ndarray) -> float:
        """One request from submission to its only token, in seconds."""
        start = time.perf_counter()
        status = self.scheduler.submit(self.next_id, prompt, 1, NO_STOP)
        plan = self.scheduler.plan()
        self.scheduler.commit(plan.step, np.ones(plan.num_samples, dtype=np.int32))
        elapsed = time.perf_counter() - start
        if status != SubmitStatus.OK or plan.num_requests != 1:
            raise RuntimeError(f"prefix_cache: expected one request in the step, got {plan} after {status}")
        self.next_id += 1
        self.recent = [*self.recent[-7:], prompt]
        return elapsed


def measure(num_pages: int, samples: int) -> Iterator[Row]:
    """Two rows for one size of the pool: new prompts, which evict, and prompts that are found."""
    cache = Cache(num_pages)
    new: list[float] = []
    found: list[float] = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(samples):
            prompt = cache.new_prompt()
            new.append(cache.run(prompt))
            found.append(cache.run(cache.recent[0]))
    finally:
        gc.enable()
    stats = cache.scheduler.stats()
    for what, times in (("new, evicts 64 pages", new), ("found whole", found)):
        yield Row(
            case=f"{num_pages:,} pages, {stats.cached_pages / num_pages:.0%} cached; a prompt of {PROMPT_PAGES} pages, {what}",
            ours=statistics.median(times) * 1e6,
            peer=None,
            unit="us",
            note=f"submit, plan and commit; slowest of {len(times)}: {max(times) * 1e6:.0f} us",
        )


def run(context: Context) -> Iterator[Row]:
    """Yield two rows for each size of the pool."""
    for num_pages in (1_000, 10_000) if context.quick else (1_000, 10_000, 100_000, 1_000_000):
        yield from measure(num_pages, 50 if context.quick else SAMPLES)
        gc.collect()


BENCHMARK = Benchmark(
    name="scheduler.prefix_cache",
    summary="submit, plan and commit of one prompt over a full prefix cache of 1,000 to 1,000,000 pages",
    run=run,
)
