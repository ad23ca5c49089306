"""How many requests run together, and how large a step may be: the stage of the scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from tokenspeed_engine.config.fields import check, option, parse_count, parse_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingConfig:
    """Limits of one engine step and of the queue before it.

    Attributes:
        max_num_seqs: most sequences in one step. Each takes one token of the budget, so the default suits a CPU; a GPU serves
            more at the same time with a larger number.
        max_num_batched_tokens: most tokens in one step; None derives it from the device (on a CPU it is measured
            at start, so that a step stays under a quarter of a second).
        prefill_chunk_size: most prompt tokens of one sequence in one step; 0 means the whole token budget.
        max_queue: most requests that wait beyond those that run; further ones are refused.
        session_ttl_s: how long what a session computed is kept for its next turn; 0 keeps nothing.
        inter_token_latency_ms: time that a step should not pass while streams run, in milliseconds: prompts take no more of it
            than that allows, as learnt from the steps that ran, and at least a quarter of what they could have otherwise. None
            derives it from the device; 0 is no target.
        starvation_limit: admissions of better priorities that a waiting priority lets pass before its next request goes first.
        pipeline_depth: steps that are planned before the oldest is committed; 1 plans, runs and commits in turn.
    """

    max_num_seqs: int = option(
        64,
        "--max-num-seqs",
        parse=parse_count,
        help="most sequences that run together",
        metavar="N",
    )
    max_num_batched_tokens: int | None = option(
        None,
        "--max-num-batched-tokens",
        parse=parse_count,
        help="most tokens of one step (default: 8192 on a GPU; measured at start on a CPU)",
        metavar="TOKENS",
    )
    prefill_chunk_size: int = option(
        0,
        "--prefill-chunk-size",
        parse=parse_count,
        help="most prompt tokens of one sequence in one step (0: the whole token budget)",
        metavar="TOKENS",
    )
    max_queue: int = option(
        1024,
        "--max-queue",
        parse=parse_count,
        help="most requests that wait beyond --max-num-seqs; more are refused",
        metavar="N",
    )
    session_ttl_s: float = option(
        300.0,
        "--session-ttl",
        parse=parse_seconds,
        help="seconds that the KV cache of a request with a session_id is kept for the session's next turn (0: not at all)",
        metavar="SECONDS",
    )
    inter_token_latency_ms: int | None = option(
        None,
        "--inter-token-latency-ms",
        parse=parse_count,
        help="time that a step should not pass while streams run, in ms (default: 50 on a GPU, 250 on a CPU; 0: no target)",
        metavar="MS",
    )
    starvation_limit: int = option(
        64,
        "--starvation-limit",
        parse=parse_count,
        help="admissions of better priorities that a waiting priority lets pass before its next request goes first",
        metavar="N",
    )
    pipeline_depth: int = 1

    def __post_init__(self) -> None:
        check(self, "max_num_seqs", 1 <= self.max_num_seqs <= 65536, expected="1 to 65536", remedy="use 64")
        check(
            self,
            "max_num_batched_tokens",
            self.max_num_batched_tokens is None or 1 <= self.max_num_batched_tokens < 2**31,
            expected="1 to 2**31-1 tokens",
            remedy="leave the flag out to let the engine choose",
        )
        check(
            self,
            "prefill_chunk_size",
            0 <= self.prefill_chunk_size < 2**31,
            expected="0 to 2**31-1 tokens",
            remedy="use 0 for the whole token budget",
        )
        check(
            self,
            "inter_token_latency_ms",
            self.inter_token_latency_ms is None or 0 <= self.inter_token_latency_ms <= 60_000,
            expected="0 to 60,000 milliseconds",
            remedy="leave the flag out for the device's default, or use 0 for no target",
        )
        check(
            self, "starvation_limit", 1 <= self.starvation_limit <= 1_000_000, expected="1 to 1,000,000 admissions", remedy="use 64"
        )
        check(self, "max_queue", 0 <= self.max_queue <= 1_000_000, expected="0 to 1,000,000", remedy="use 1024")
        check(
            self,
            "session_ttl_s",
            0 <= self.session_ttl_s <= 30 * 86400,
            expected="0 to 2592000 seconds",
            remedy="use 300, or 0 to keep nothing",
        )
        if self.pipeline_depth not in (1, 2):
            raise ValueError(f"pipeline_depth: expected 1 or 2, got {self.pipeline_depth}")

    @property
    def max_requests(self) -> int:
        """Most requests in flight, running and waiting."""
        return self.max_num_seqs + self.max_queue
