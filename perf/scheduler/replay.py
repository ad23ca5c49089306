"""Replay of agentic traces through the real control plane, in logical time.

Conversations of 10 to 15 turns: 50 to 63 thousand tokens at first, 800 more a turn, 500 out, pauses between. The pool holds half of
what they are at their ends. The hit rate stands beside Belady's rule over pages with the same capacity.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from perf.harness import Benchmark, Context, Row
from perf.scheduler.oracle import belady_hit_rate
from perf.scheduler.simulator import Outcome, StepModel, replay
from perf.scheduler.traces import Session, agentic
from tokenspeed_engine.scheduler import SchedulerConfig

PAGE_SIZE = 64
MAX_NUM_SEQS = 64
TARGET_US = 50_000


@dataclass(frozen=True, slots=True)
class Policy:
    """What is compared.

    Attributes:
        name: of the rows.
        ttl_s: how long a session's pages are kept; 0: not at all.
        learns: whether eviction learns when pages are wanted again.
        host_share: of the capacity, in host memory; the rest is on the device, so that all policies have the same in all.
    """

    name: str
    ttl_s: int = 0
    learns: bool = True
    host_share: float = 0.0


POLICIES = (
    Policy("adaptive eviction"),
    Policy("plain LRU", learns=False),
    Policy("adaptive, half of it on the host", host_share=0.5),
    Policy("adaptive, half on the host, session TTL 300 s", ttl_s=300, host_share=0.5),
    Policy("adaptive, session TTL 300 s", ttl_s=300),
    Policy("LRU, fixed TTL 10 s", ttl_s=10, learns=False),
)


def pool_pages(sessions: list[Session]) -> int:
    """Pages that hold half of all conversations at their ends, and at least the longest one."""
    pages = [-(-session.final_tokens // PAGE_SIZE) for session in sessions]
    return max(sum(pages) // 2, *pages)


def config(sessions: list[Session], policy: Policy, *, target_us: int = TARGET_US) -> SchedulerConfig:
    """The scheduler's, for a trace."""
    longest = max(-(-session.final_tokens // PAGE_SIZE) for session in sessions)
    num_pages = max(int(pool_pages(sessions) * (1 - policy.host_share)), longest)
    return SchedulerConfig(
        num_pages=num_pages,
        num_host_pages=pool_pages(sessions) - num_pages,
        page_size=PAGE_SIZE,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=8192,
        max_model_len=max(session.final_tokens for session in sessions) + 1,
        session_ttl_us=policy.ttl_s * 1_000_000,
        inter_token_latency_us=target_us,
        adaptive_eviction=policy.learns,
    )


def rows(name: str, outcome: Outcome, num_pages: int) -> Iterator[Row]:
    """All figures of one replay."""
    oracle = belady_hit_rate(outcome.turns, num_pages, PAGE_SIZE)
    stats = outcome.stats
    yield Row(
        case=f"{name}: hit rate",
        ours=100 * outcome.hit_rate,
        peer=100 * oracle,
        unit="%",
        peer_name="Belady over pages, same capacity",
        higher_is_better=True,
        goal=0.97,
        note=f"{stats.num_evicted_pages} pages evicted, {stats.num_retractions} retractions, {outcome.num_steps} steps",
    )
    for what, value, unit in (
        ("time to first token, first turns, median", outcome.first_token_s(0.5, later=False), "s"),
        ("time to first token, later turns, median", outcome.first_token_s(0.5, later=True), "s"),
        ("time to first token, later turns, p99", outcome.first_token_s(0.99, later=True), "s"),
        ("inter-token latency, median", outcome.gap_ms(0.5), "ms"),
        ("inter-token latency, p99", outcome.gap_ms(0.99), "ms"),
        ("job completion, median", float(np.median(outcome.job_us)) / 1e6, "s"),
        ("job completion, longest", float(outcome.job_us.max()) / 1e6, "s"),
        ("fairness over sessions (Jain)", outcome.jain, "1"),
    ):
        yield Row(case=f"{name}: {what}", ours=value, peer=None, unit=unit)


def run(context: Context) -> Iterator[Row]:
    """Yield the figures of each number of sessions under each policy."""
    numbers = [int(n) for n in context.options.get("sessions", "4" if context.quick else "8,64,256").split(",")]
    scale = 0.02 if context.quick else 1.0
    for number in numbers:
        for policy in POLICIES[: int(context.options.get("policies", len(POLICIES)))]:
            sessions = agentic(number, scale=scale)
            outcome = replay(config(sessions, policy), sessions, StepModel())
            yield from rows(f"{number} sessions, {policy.name}", outcome, pool_pages(sessions))
        sessions = agentic(number, scale=scale)
        outcome = replay(config(sessions, POLICIES[0], target_us=0), sessions, StepModel())
        for share, what in ((0.5, "median"), (0.99, "p99")):
            yield Row(
                case=f"{number} sessions, no latency target: inter-token latency, {what}",
                ours=outcome.gap_ms(share),
                peer=None,
                unit="ms",
            )


BENCHMARK = Benchmark(
    name="scheduler.replay",
    summary="agentic traces through the control plane in logical time: hit rate beside Belady's, latencies, job times, fairness",
    run=run,
)
