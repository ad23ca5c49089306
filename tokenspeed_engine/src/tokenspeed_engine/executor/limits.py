"""The scheduler's sizes and limits, from what was configured and what the executor found."""

from __future__ import annotations

from tokenspeed_engine.config import CacheConfig, SchedulingConfig
from tokenspeed_engine.executor.executor import ModelExecutor
from tokenspeed_engine.scheduler import SchedulerConfig

# What a step may take while streams run: on a GPU twenty tokens a second, faster than people read; on a CPU the quarter of a second
# within which a client that left is noticed.
_LATENCY_MS = {"cpu": 250}
_OTHER_LATENCY_MS = 50

# Hashes that may wait for the publisher, which takes them once a step: a million pages are gone over in no step.
_EVENT_PAGES = 1_000_000


def scheduler_config(
    executor: ModelExecutor, cache: CacheConfig, scheduling: SchedulingConfig, *, with_tiers: bool = True
) -> SchedulerConfig:
    """Return the configuration of the scheduler that plans for `executor`.

    A measured budget bounds what a step's prompts cost, and shrinks their chunks as the context grows; the step must still hold one
    token of each running sequence. A configured budget is taken as it is.

    Args:
        executor: has pools and limits.
        cache: policies of the cache.
        scheduling: limits of a step.
        with_tiers: False plans no copies to the host, and tells no events.
    """
    num_host_pages = executor.num_host_pages if with_tiers else 0
    budget, limits = executor.max_num_batched_tokens, executor.step_limits
    latency_ms = scheduling.inter_token_latency_ms
    if latency_ms is None:
        latency_ms = _LATENCY_MS.get(executor.device.type, _OTHER_LATENCY_MS)
    return SchedulerConfig(
        num_pages=executor.num_pages,
        page_size=executor.page_size,
        max_num_seqs=scheduling.max_num_seqs,
        max_num_batched_tokens=max(budget, scheduling.max_num_seqs),
        max_model_len=executor.max_model_len,
        chunk_size=scheduling.prefill_chunk_size,
        enable_prefix_cache=cache.enable_prefix_caching,
        max_in_flight_steps=max(scheduling.pipeline_depth, 2),
        max_step_cost=limits.num_tokens if limits else 0,
        context_cost_scale=limits.context_cost_scale if limits else 0,
        session_ttl_us=round(scheduling.session_ttl_s * 1e6),
        inter_token_latency_us=latency_ms * 1000,
        starvation_limit=scheduling.starvation_limit,
        num_host_pages=num_host_pages,
        host_write_through=num_host_pages > 0 and cache.host_cache_write_policy == "write-through",
        external_store=num_host_pages > 0 and cache.external_cache != "none",
        kv_event_pages=_EVENT_PAGES if with_tiers and cache.kv_events_endpoint else 0,
    )
