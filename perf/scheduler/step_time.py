"""Time of one step of the control plane: plan, read the plan's arrays, commit, read the result. No model runs.

All requests decode. The peer is the public wheel tokenspeed-scheduler, driven through its fastest public calls (block tables as
arrays), with the same prompts, page size and token budget; samples of both alternate in one run.
"""

from __future__ import annotations

import gc
import importlib.metadata
import importlib.util
import random
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from perf.harness import Benchmark, Context, Row
from tokenspeed_engine.scheduler import Scheduler, SchedulerConfig, SubmitStatus

PAGE_SIZE = 16
BUDGET_TOKENS = 65_536
ROUNDS = 20
OUR_STEPS_IN_ROUND = 16  # one page of tokens: each round sees every request cross a page border once
WARM_UP_STEPS = 2 * PAGE_SIZE
MAX_NEW_TOKENS = 1024
PEER_TIME_LIMIT_S = 60.0
PLAN_ARRAYS = (
    "request_ids",
    "slots",
    "query_lens",
    "cu_query_lens",
    "seq_lens",
    "token_ids",
    "positions",
    "slot_mapping",
    "sample_rows",
    "output_index",
    "page_updates",
)
COMMIT_ARRAYS = ("request_ids", "token_ids", "finish_reasons", "num_cached_tokens")


def prompts(num_requests: int, context: int) -> list[bytes]:
    """Random prompts, one byte a token: different from each other, so that nothing is shared."""
    source = random.Random(0)
    return [source.randbytes(context) for _ in range(num_requests)]


def num_pages(num_requests: int, context: int) -> int:
    """A pool that holds everything, with a little to spare: no eviction and no retraction in the figures."""
    return num_requests * (-(-(context + MAX_NEW_TOKENS) // PAGE_SIZE) + 1) + 16


def our_step(num_requests: int, texts: list[bytes]) -> Callable[[], None]:
    """A scheduler with all requests decoding; returns what runs one more step."""
    context = len(texts[0])
    config = SchedulerConfig(
        num_pages=num_pages(num_requests, context),
        page_size=PAGE_SIZE,
        max_num_seqs=num_requests,
        max_num_batched_tokens=max(BUDGET_TOKENS, num_requests),
        max_model_len=context + MAX_NEW_TOKENS,
    )
    scheduler = Scheduler(config)
    no_stop = np.empty(0, dtype=np.int32)
    for request_id, text in enumerate(texts):
        tokens = np.frombuffer(text, dtype=np.uint8).astype(np.int32)
        status = scheduler.submit(request_id, tokens, MAX_NEW_TOKENS, no_stop)
        if status != SubmitStatus.OK:
            raise RuntimeError(f"step_time: expected every request to be taken, got {status}")
    while True:
        plan = scheduler.plan()
        scheduler.commit(plan.step, np.ones(plan.num_samples, dtype=np.int32))
        if plan.num_decodes == num_requests:
            break
    sampled = np.ones(num_requests, dtype=np.int32)

    def step() -> None:
        plan = scheduler.plan()
        for name in PLAN_ARRAYS:
            getattr(plan, name)
        result = scheduler.commit(plan.step, sampled)
        for name in COMMIT_ARRAYS:
            getattr(result, name)

    return step


def peer_step(peer: Any, num_requests: int, texts: list[bytes]) -> Callable[[], None] | None:
    """The same for the peer; None when its prefill takes too long."""
    context = len(texts[0])
    config = peer.SchedulerConfig()
    config.num_device_pages = num_pages(num_requests, context)
    config.num_snapshot_pages = 1  # with 0 it refuses to start
    config.max_batch_size = num_requests
    config.max_scheduled_tokens = max(BUDGET_TOKENS, num_requests)
    config.prefix_granularity = PAGE_SIZE
    config.disable_l2_cache = True
    config.enable_mixed_prefill_decode = True
    config.cache_groups = [peer.CacheGroupConfig("full", PAGE_SIZE, config.num_device_pages, peer.AttnKind.Full)]
    scheduler = peer.Scheduler(config)
    for request_id, text in enumerate(texts):
        spec = peer.RequestSpec()
        spec.request_id, spec.tokens, spec.max_new_tokens = str(request_id), list(text), MAX_NEW_TOKENS
        scheduler.submit_requests([spec])

    def step() -> None:
        plan = scheduler.next_execution_plan()
        event = peer.ExecutionEvent()
        for batch in plan.forward:
            num_extends, request_ids = batch.num_extends(), batch.request_ids
            lengths, prefixes, totals = batch.input_lengths, batch.extend_prefix_lens, batch.prefill_lengths
            _ = (batch.request_pool_indices, batch.input_ids, batch.decode_input_ids, batch.block_tables_arrays())
            for row, request_id in enumerate(request_ids):
                result = peer.ForwardEvent.ExtendResult()
                result.request_id = request_id
                is_last = row >= num_extends or prefixes[row] + lengths[row] >= totals[row]
                result.tokens = [1] if is_last else []
                event.add_event(result)
        scheduler.advance(event)

    deadline = time.monotonic() + PEER_TIME_LIMIT_S
    while scheduler.decoding_size() < num_requests:
        if time.monotonic() > deadline:
            return None
        step()
    return step


def sample_s(step: Callable[[], None], count: int, into: list[float]) -> None:
    """Time `count` single steps."""
    for _ in range(count):
        start = time.perf_counter()
        step()
        into.append(time.perf_counter() - start)


def measure(num_requests: int, context: int, rounds: int, peer: Any, peer_name: str) -> Row:
    """One case."""
    texts = prompts(num_requests, context)
    ours = our_step(num_requests, texts)
    theirs, note = None, "peer tokenspeed-scheduler is not installed (pip install --no-deps tokenspeed-scheduler==0.1.42)"
    if peer is not None:
        theirs = peer_step(peer, num_requests, texts)
        note = "" if theirs else f"peer: prompts not prefilled after {PEER_TIME_LIMIT_S:.0f} s"
    our_times: list[float] = []
    peer_times: list[float] = []
    sample_s(ours, WARM_UP_STEPS, [])
    if theirs is not None:
        sample_s(theirs, 2, [])
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            sample_s(ours, OUR_STEPS_IN_ROUND, our_times)
            if theirs is not None:
                sample_s(theirs, 1, peer_times)
    finally:
        gc.enable()
    worst = f"slowest of our {len(our_times)} steps {max(our_times) * 1e6:.0f} us"
    return Row(
        case=f"{num_requests} decoding, {context} tokens of context, page {PAGE_SIZE}",
        ours=statistics.median(our_times) * 1e6,
        peer=statistics.median(peer_times) * 1e6 if peer_times else None,
        unit="us",
        peer_name=peer_name,
        goal=10.0 if num_requests == 256 else None,
        note="; ".join(part for part in (note, worst) if part),
    )


def run(context: Context) -> Iterator[Row]:
    """Yield one row for each number of requests and each context length."""
    peer, peer_name = None, ""
    if importlib.util.find_spec("tokenspeed_scheduler"):
        peer = importlib.import_module("tokenspeed_scheduler")
        peer_name = f"tokenspeed-scheduler {importlib.metadata.version('tokenspeed-scheduler')}"
    for num_requests in (1, 64) if context.quick else (1, 64, 256, 1024):
        for tokens in (512, 32_768):
            if context.quick and tokens > 512 and num_requests > 1:
                continue
            yield measure(num_requests, tokens, 3 if context.quick else ROUNDS, peer, peer_name)
            gc.collect()


BENCHMARK = Benchmark(
    name="scheduler.step_time",
    summary="plan, read-out and commit of the control plane: 1 to 1,024 decoding requests, 512 and 32,768 tokens of context",
    run=run,
)
