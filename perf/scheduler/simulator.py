"""Drives the real control plane through a trace, in logical time: a model of step times stands for the device; no model runs."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perf.scheduler.traces import Session
from tokenspeed_engine.scheduler import RequestOptions, Scheduler, SchedulerConfig, SubmitStatus

_NO_STOP = np.empty(0, dtype=np.int32)
_ANSWER_TOKEN = 1


@dataclass(frozen=True, slots=True)
class StepModel:
    """Time of a step, in microseconds: of the order of a large mixture of experts with a latent cache on one node of eight GPUs.

    Attributes:
        base_us: reading the weights.
        decode_us: one more decode.
        decode_context_us: one more token of a decode's context.
        prefill_us: one more prompt token.
        prefill_context_us: one more token of a prompt token's context.
        copy_page_us: one page of 64 tokens between host and devices.
    """

    base_us: float = 8000.0
    decode_us: float = 40.0
    decode_context_us: float = 0.015
    prefill_us: float = 20.0
    prefill_context_us: float = 0.0008
    copy_page_us: float = 90.0

    def step_us(self, plan: Any) -> int:
        """Time of a plan."""
        query, seq, num_decodes = plan.query_lens.astype(np.int64), plan.seq_lens.astype(np.int64), plan.num_decodes
        decodes = self.decode_us * num_decodes + self.decode_context_us * int(seq[:num_decodes].sum())
        count, end = query[num_decodes:], seq[num_decodes:]
        contexts = int((count * (end - count) + count * (count - 1) // 2).sum())
        return int(self.base_us + decodes + self.prefill_us * int(count.sum()) + self.prefill_context_us * contexts)


@dataclass(slots=True)
class TurnRecord:
    """What became of one turn. Times in microseconds of logical time; tokens of the prompt."""

    session: int
    turn: int
    arrived_us: int
    num_prompt: int
    num_output: int
    num_cached: int = 0
    first_token_us: int = 0
    ended_us: int = 0


@dataclass(slots=True)
class Outcome:
    """A whole replay."""

    turns: list[TurnRecord]
    gaps_us: NDArray[np.int64]
    num_steps: int
    stats: Any
    job_us: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))

    @property
    def hit_rate(self) -> float:
        """Prompt tokens that came from a cache, of all prompt tokens."""
        return sum(turn.num_cached for turn in self.turns) / sum(turn.num_prompt for turn in self.turns)

    def first_token_s(self, share: float, *, later: bool) -> float:
        """Quantile of the time to first token: of first turns, or of all later ones."""
        waits = [turn.first_token_us - turn.arrived_us for turn in self.turns if (turn.turn > 0) == later]
        return float(np.quantile(waits, share)) / 1e6

    def gap_ms(self, share: float) -> float:
        """Quantile of the time between two tokens of a stream."""
        return float(np.quantile(self.gaps_us, share)) / 1e3

    @property
    def jain(self) -> float:
        """Jain's index over sessions of generated tokens for each second of waiting for the engine: 1 is alike for all."""
        waited, tokens = np.zeros(len(self.job_us)), np.zeros(len(self.job_us))
        for turn in self.turns:
            waited[turn.session] += turn.ended_us - turn.arrived_us
            tokens[turn.session] += turn.num_output
        rate = tokens / waited
        return float(rate.sum() ** 2 / (len(rate) * (rate**2).sum()))


def replay(config: SchedulerConfig, sessions: Sequence[Session], model: StepModel) -> Outcome:
    """Run the sessions to their ends.

    Args:
        config: of the scheduler; one that counts no time of its own.
        sessions: the trace. Each is a tenant's conversation with a number of its own.
        model: what a step takes.
    Raises:
        RuntimeError: a turn is refused, or nothing can run although work is left.
    """
    scheduler = Scheduler(config)
    texts = [np.empty(session.final_tokens, dtype=np.int32) for session in sessions]
    known, taken = [0] * len(sessions), [0] * len(sessions)  # tokens of the conversation; tokens of its prompts
    arrivals = [(int(session.turns[0].gap_s * 1e6), index, 0) for index, session in enumerate(sessions)]
    heapq.heapify(arrivals)
    records: list[TurnRecord] = []
    last_token_us = np.full(sum(len(session.turns) for session in sessions), -1, dtype=np.int64)
    gaps: list[NDArray[np.int64]] = []
    job_us = np.zeros(len(sessions), dtype=np.int64)
    now_us = num_steps = 0

    def arrive(index: int, turn_index: int, at_us: int) -> None:
        turn, text = sessions[index].turns[turn_index], texts[index]
        text[known[index] : known[index] + turn.num_new] = sessions[index].prompt_tokens[taken[index] : taken[index] + turn.num_new]
        known[index] += turn.num_new
        taken[index] += turn.num_new
        options = RequestOptions(session=index + 1)
        status = scheduler.submit(len(records), text[: known[index]], turn.num_output, _NO_STOP, options=options)
        if status != SubmitStatus.OK:
            raise RuntimeError(f"replay: turn {turn_index} of session {index} is refused: {status}")
        records.append(TurnRecord(index, turn_index, at_us, known[index], turn.num_output))

    while arrivals or scheduler.has_work():
        while arrivals and arrivals[0][0] <= now_us:
            at_us, index, turn_index = heapq.heappop(arrivals)
            arrive(index, turn_index, at_us)
        scheduler.advance_clock(now_us)
        plan = scheduler.plan()
        copies = np.unique(np.concatenate([plan.write_back_ids, plan.load_back_ids]))
        copy_us = int(model.copy_page_us * (len(plan.write_backs) + len(plan.load_backs)))
        if not plan and len(copies):  # what could run waits for them
            now_us += copy_us
            scheduler.complete_transfers(copies, np.ones(len(copies), dtype=np.bool_))
            continue
        if not plan:
            if not arrivals:
                if scheduler.has_work():
                    raise RuntimeError(f"replay: nothing runs and nothing arrives, though work is left: {scheduler.stats()}")
                break
            now_us = max(now_us, arrivals[0][0])
            continue
        step_us = max(model.step_us(plan), copy_us)  # copies run beside the step, and end with it
        now_us += step_us
        num_steps += 1
        events = scheduler.commit(plan.step, np.full(plan.num_samples, _ANSWER_TOKEN, dtype=np.int32), step_us)
        if len(copies):
            scheduler.complete_transfers(copies, np.ones(len(copies), dtype=np.bool_))
        ids = events.request_ids
        before = last_token_us[ids]
        gaps.append(now_us - before[before >= 0])
        last_token_us[ids] = now_us
        for number in ids[before < 0].tolist():
            records[number].first_token_us = now_us
        cached = events.num_cached_tokens
        for row in np.flatnonzero(events.finish_reasons).tolist():
            record = records[int(ids[row])]
            record.num_cached, record.ended_us = int(cached[row]), now_us
            index, next_turn = record.session, record.turn + 1
            texts[index][known[index] : known[index] + record.num_output] = _ANSWER_TOKEN
            known[index] += record.num_output
            if next_turn < len(sessions[index].turns):
                gap_us = int(sessions[index].turns[next_turn].gap_s * 1e6)
                heapq.heappush(arrivals, (now_us + gap_us, index, next_turn))
            else:
                job_us[index] = now_us - int(sessions[index].turns[0].gap_s * 1e6)
    return Outcome(records, np.concatenate(gaps), num_steps, scheduler.stats(), job_us)
