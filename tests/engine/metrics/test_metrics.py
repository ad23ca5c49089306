"""Counters survive wrong statistics and restarts of the core."""

from __future__ import annotations

import logging

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tokenspeed_engine.metrics import EngineMetrics, RequestRecord
from tokenspeed_engine.types import EngineStats, FinishReason


def values(metrics: EngineMetrics) -> dict[str, float]:
    """Sample values by name, with label values appended."""
    found = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            labels = "".join(f"|{value}" for _, value in sorted(sample.labels.items()))
            found[sample.name.removeprefix("tokenspeed:") + labels] = sample.value
    return found


def test_negative_cache_hits_are_clamped_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    metrics = EngineMetrics()
    metrics.request_started(10, 4, 0.1)
    with caplog.at_level(logging.WARNING):
        metrics.request_started(10, -1, 0.1)
        metrics.request_started(10, -5, 0.1)
        metrics.request_started(10, 99, 0.1)
    found = values(metrics)
    assert found["prompt_tokens_total"] == 40
    assert found["prompt_tokens_by_source_total|local_cache_hit"] == 14
    assert found["prompt_tokens_by_source_total|local_compute"] == 26
    assert len([record for record in caplog.records if "prompt_tokens_by_source" in record.message]) == 1


def test_sums_of_the_core_go_on_over_a_restart() -> None:
    """Case Z14: the cache's hits and queries are sums, which no batch and no restart of the core overwrites."""
    metrics = EngineMetrics()
    metrics.core_started()
    metrics.core_stats(EngineStats(num_steps=5, prefix_query_tokens=100, prefix_hit_tokens=40, num_pages=10))
    metrics.core_stats(EngineStats(num_steps=7, prefix_query_tokens=120, prefix_hit_tokens=40, num_pages=10))
    metrics.core_stopped()
    metrics.core_restarted()
    assert values(metrics)["engine_up"] == 0
    metrics.core_started()
    metrics.core_stats(EngineStats(num_steps=1, prefix_query_tokens=3, prefix_hit_tokens=1, num_pages=10))
    found = values(metrics)
    assert found["engine_up"] == 1
    assert found["engine_steps_total"] == 8
    assert found["prefix_cache_queries_total"] == 123
    assert found["prefix_cache_hits_total"] == 41
    assert found["engine_restarts_total"] == 1


def test_a_sum_that_goes_backwards_is_not_counted(caplog: pytest.LogCaptureFixture) -> None:
    metrics = EngineMetrics()
    metrics.core_stats(EngineStats(prefix_hit_tokens=40))
    with caplog.at_level(logging.WARNING):
        metrics.core_stats(EngineStats(prefix_hit_tokens=39))
    assert values(metrics)["prefix_cache_hits_total"] == 40
    assert "prefix_cache_hits" in caplog.text


def test_pages_by_state() -> None:
    metrics = EngineMetrics()
    metrics.core_stats(EngineStats(num_pages=10, num_free_pages=5, num_cached_pages=3, num_running=2, num_waiting=4))
    found = values(metrics)
    assert [found[f"kv_cache_pages|{state}"] for state in ("free", "cached", "owned")] == [5, 3, 2]
    assert found["kv_cache_usage_perc"] == pytest.approx(0.2)
    assert found["num_requests_running"] == 2
    assert found["num_requests_waiting"] == 4


def test_latencies_and_ends() -> None:
    metrics = EngineMetrics()
    metrics.request_started(3, 0, 0.2)
    metrics.request_queued(0.1)
    metrics.token_gap(0.3, 3)
    metrics.tokens_generated(4)
    metrics.request_finished(RequestRecord(3, 4, FinishReason.LENGTH, 1.5))
    metrics.request_finished(RequestRecord(3, 4, FinishReason.ABORT, -1.0))
    found = values(metrics)
    assert found["time_to_first_token_seconds_count"] == 1
    assert found["request_queue_time_seconds_count"] == 1
    assert found["inter_token_latency_seconds_count"] == 3
    assert found["inter_token_latency_seconds_sum"] == pytest.approx(0.3)
    assert found["generation_tokens_total"] == 4
    assert found["request_finished_total|length"] == 1
    assert found["request_finished_total|abort"] == 1
    assert found["e2e_request_latency_seconds_sum"] == pytest.approx(1.5)


def test_rendering_changes_nothing() -> None:
    metrics = EngineMetrics()
    metrics.request_started(3, 1, 0.2)
    first = {k: v for k, v in values(metrics).items() if "created" not in k}
    assert first == {k: v for k, v in values(metrics).items() if "created" not in k}


def test_memory_of_the_core() -> None:
    """Sizes as they are; what the process held is gone with it, the most that it held is not."""
    metrics = EngineMetrics()
    metrics.core_sizes(97_000_000, 47_000_000)
    metrics.core_memory(300_000_000, 500_000_000)
    found = values(metrics)
    assert (found["weights_bytes"], found["kv_cache_bytes"]) == (97e6, 47e6)
    assert (found["engine_resident_memory_bytes"], found["engine_peak_memory_bytes"]) == (3e8, 5e8)
    metrics.core_stopped()
    found = values(metrics)
    assert (found["engine_resident_memory_bytes"], found["engine_peak_memory_bytes"]) == (0, 5e8)
