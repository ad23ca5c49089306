"""The metrics of the engine, in Prometheus' text format."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from tokenspeed_engine.metrics.safe import SafeCounter
from tokenspeed_engine.types import EngineStats, FinishReason

logger = logging.getLogger(__name__)

_LATENCY_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_TOKEN_TIME_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 10.0)
_LENGTH_BUCKETS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
_PREFIX = "tokenspeed:"


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """What is counted when a request ends.

    Attributes:
        num_prompt_tokens: length of the prompt.
        num_generated_tokens: tokens that were sampled for it.
        finish_reason: why it ended.
        e2e_s: time from arrival to the last token.
    """

    num_prompt_tokens: int
    num_generated_tokens: int
    finish_reason: FinishReason
    e2e_s: float


class EngineMetrics:
    """All metrics of one server, in a registry of its own. Used by the front end's event loop alone.

    Nothing here raises for a wrong statistic, and nothing is touched by health probes.
    """

    content_type = CONTENT_TYPE_PLAIN_0_0_4

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._make_counters(self.registry)
        self._make_gauges(self.registry)
        self._make_histograms(self.registry)
        self._core = EngineStats()

    def render(self) -> bytes:
        """The current values as Prometheus' text."""
        return generate_latest(self.registry)

    # -- requests ---------------------------------------------------------------------------------------------------------

    def request_started(self, num_prompt_tokens: int, num_cached_tokens: int, ttft_s: float) -> None:
        """The first token of a request arrived.

        Args:
            num_prompt_tokens: length of the prompt.
            num_cached_tokens: of these, how many the prefix cache held. A value outside 0..num_prompt_tokens is clamped, so that
                the sum over the sources stays the number of prompt tokens.
            ttft_s: time from arrival to now.
        """
        total = int(self._prompt_tokens.clamp(num_prompt_tokens))
        cached = min(int(self._prompt_tokens_by_source.clamp(num_cached_tokens)), total)
        self._prompt_tokens.inc(total)
        self._prompt_tokens_by_source.inc(cached, source="local_cache_hit")
        self._prompt_tokens_by_source.inc(total - cached, source="local_compute")
        self._ttft.observe(max(ttft_s, 0.0))

    def request_queued(self, queue_s: float) -> None:
        """A request was scheduled for the first time after this wait."""
        self._queue.observe(max(queue_s, 0.0))

    def tokens_generated(self, num_tokens: int) -> None:
        """New tokens of any request."""
        self._generation_tokens.inc(num_tokens)

    def token_gap(self, gap_s: float, num_tokens: int) -> None:
        """Time between two arrivals of one request's tokens, and the number of tokens in the later one."""
        if num_tokens > 0:
            per_token_s = max(gap_s, 0.0) / num_tokens
            for _ in range(num_tokens):
                self._itl.observe(per_token_s)

    def request_finished(self, record: RequestRecord) -> None:
        """A request ended, for whatever reason."""
        self._requests.inc(finished_reason=record.finish_reason.name.lower())
        self._e2e.observe(max(record.e2e_s, 0.0))
        self._prompt_length.observe(max(record.num_prompt_tokens, 0))
        self._generation_length.observe(max(record.num_generated_tokens, 0))

    def request_rejected(self, code: str) -> None:
        """A request was refused before it ran."""
        self._rejected.inc(code=code)

    # -- engine core ------------------------------------------------------------------------------------------------------

    def core_started(self) -> None:
        """A new engine core is ready: its sums begin at zero again, the counters here go on."""
        self._core = EngineStats()
        self._up.set(1)

    def core_stopped(self) -> None:
        """The engine core is gone; nothing runs in it."""
        self._up.set(0)
        for gauge in (self._running, self._waiting, self._cache_usage, self._resident):
            gauge.set(0)

    def core_restarted(self) -> None:
        """The supervisor starts the core anew."""
        self._restarts.inc()

    def core_stats(self, stats: EngineStats) -> None:
        """Take over a snapshot of the core: sizes as they are, sums by their growth."""
        before, self._core = self._core, stats
        self._running.set(stats.num_running)
        self._waiting.set(stats.num_waiting)
        self._pages.labels(state="free").set(stats.num_free_pages)
        self._pages.labels(state="cached").set(stats.num_cached_pages)
        self._pages.labels(state="owned").set(stats.num_owned_pages)
        self._cache_usage.set(stats.num_owned_pages / stats.num_pages if stats.num_pages else 0.0)
        self._steps.inc(stats.num_steps - before.num_steps)
        self._step_tokens.inc(stats.num_step_tokens - before.num_step_tokens)
        self._preemptions.inc(stats.num_retractions - before.num_retractions)
        self._aborts.inc(stats.num_aborts - before.num_aborts)
        self._prefix_queries.inc(stats.prefix_query_tokens - before.prefix_query_tokens)
        self._prefix_hits.inc(stats.prefix_hit_tokens - before.prefix_hit_tokens)
        if stats.num_steps > before.num_steps:
            self._step_time.observe(max(stats.step_time_s, 0.0))

    def core_memory(self, resident_bytes: int, peak_bytes: int) -> None:
        """Take over what the core's process holds, and the most that it ever held."""
        self._resident.set(resident_bytes)
        self._peak.set(peak_bytes)

    def core_sizes(self, weights_bytes: int, kv_cache_bytes: int) -> None:
        """Take over what the core's largest parts take."""
        self._weights.set(weights_bytes)
        self._cache.set(kv_cache_bytes)

    # -- construction -----------------------------------------------------------------------------------------------------

    def _make_counters(self, registry: CollectorRegistry) -> None:
        def counter(name: str, documentation: str, *labels: str) -> SafeCounter:
            return SafeCounter(_PREFIX + name, documentation, registry, labels)

        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests that produced a token.")
        self._prompt_tokens_by_source = counter(
            "prompt_tokens_by_source", "Prompt tokens by where their KV cache came from.", "source"
        )
        self._generation_tokens = counter("generation_tokens", "Tokens generated.")
        self._requests = counter("request_finished", "Requests that ended, by reason.", "finished_reason")
        self._rejected = counter("request_rejected", "Requests refused before they ran, by code.", "code")
        self._aborts = counter("request_aborts", "Requests aborted in the engine core before their end.")
        self._preemptions = counter("num_preemptions", "Running requests sent back to wait for lack of pages.")
        self._prefix_queries = counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self._prefix_hits = counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self._steps = counter("engine_steps", "Steps of the engine core.")
        self._step_tokens = counter("engine_step_tokens", "Tokens computed in all steps.")
        self._restarts = counter("engine_restarts", "Restarts of the engine core.")

    def _make_gauges(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, documentation: str, *labels: str) -> Gauge:
            return Gauge(_PREFIX + name, documentation, labelnames=labels, registry=registry)

        self._running = gauge("num_requests_running", "Requests that hold pages.")
        self._waiting = gauge("num_requests_waiting", "Requests that wait to be scheduled.")
        self._pages = gauge("kv_cache_pages", "Pages of the KV cache by state.", "state")
        self._cache_usage = gauge("kv_cache_usage_perc", "Share of the pages that running requests hold; 1 is all.")
        self._resident = gauge("engine_resident_memory_bytes", "Physical memory of the engine core's process.")
        self._peak = gauge("engine_peak_memory_bytes", "The most physical memory that the engine core's process held.")
        self._weights = gauge("weights_bytes", "Memory of the model's weights.")
        self._cache = gauge("kv_cache_bytes", "Memory of the KV cache's pages.")
        self._up = gauge("engine_up", "1 while the engine core is ready.")

    def _make_histograms(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, documentation: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(_PREFIX + name, documentation, buckets=buckets, registry=registry)

        self._ttft = histogram("time_to_first_token_seconds", "From arrival to the first token.", _LATENCY_BUCKETS_S)
        self._itl = histogram("inter_token_latency_seconds", "Between tokens of one request.", _TOKEN_TIME_BUCKETS_S)
        self._e2e = histogram("e2e_request_latency_seconds", "From arrival to the end.", _LATENCY_BUCKETS_S)
        self._queue = histogram("request_queue_time_seconds", "From the core's receipt to the first step.", _LATENCY_BUCKETS_S)
        self._step_time = histogram("engine_step_seconds", "Duration of a step.", _TOKEN_TIME_BUCKETS_S)
        self._prompt_length = histogram("request_prompt_tokens", "Prompt tokens of a request.", _LENGTH_BUCKETS)
        self._generation_length = histogram("request_generation_tokens", "Generated tokens of a request.", _LENGTH_BUCKETS)
