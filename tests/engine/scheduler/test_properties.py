"""A random life of the control plane: after every call, every page has one owner and every row reads its own tokens.

Two instances get the same calls and must give the same plans, bit by bit. A fake cache of token ids stands for keys and values:
each step writes its tokens to its slots and then reads each sequence back through the page table, as attention would.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from tokenspeed_engine.scheduler import AbortStatus, Plan, RequestOptions, Scheduler, SchedulerConfig, SubmitStatus

PLAN_ARRAYS = [
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
]
COMMIT_ARRAYS = ["request_ids", "token_ids", "finish_reasons", "num_prompt_tokens", "num_cached_tokens", "output_index"]
STATS = [
    "free_pages",
    "owned_pages",
    "cached_pages",
    "evictable_pages",
    "num_waiting",
    "num_running",
    "num_draining",
    "num_in_flight_steps",
    "num_retractions",
    "num_preemptions",
    "num_evicted_pages",
    "prefix_query_tokens",
    "prefix_hit_tokens",
    "recomputed_tokens",
    "num_submitted",
    "num_finished",
    "num_aborted",
    "num_steps",
]
STOP = 3
GARBAGE = -7


def arrays_of(source: Any, names: list[str]) -> dict[str, np.ndarray]:
    return {name: getattr(source, name).copy() for name in names}


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return all(np.array_equal(a[name], b[name]) for name in a)


@dataclass
class Sequence:
    """What the test knows of a request."""

    tokens: list[int]
    num_prompt: int
    max_new: int
    min_new: int
    stops: bool
    cached: bool
    is_live: bool = True
    was_planned: bool = False

    @property
    def num_sampled(self) -> int:
        return len(self.tokens) - self.num_prompt


@dataclass
class Step:
    """A plan, copied, with the page table as a device would have it when the step starts."""

    number: int
    num_decodes: int
    arrays: dict[str, np.ndarray]
    table: np.ndarray = field(repr=False)

    def rows(self) -> list[tuple[int, slice]]:
        ends = self.arrays["cu_query_lens"]
        return [(int(r), slice(int(ends[i]), int(ends[i + 1]))) for i, r in enumerate(self.arrays["request_ids"])]


class ControlPlane(RuleBasedStateMachine):
    """Random submissions with shared beginnings, plans, commits, aborts, flushes and misuse."""

    @initialize(
        num_pages=st.integers(2, 24),
        page_size=st.sampled_from([1, 2, 3, 4, 16]),
        max_num_seqs=st.integers(1, 5),
        extra_budget=st.integers(0, 24),
        chunk_size=st.sampled_from([0, 0, 1, 5]),
        max_step_cost=st.sampled_from([0, 0, 1, 6, 12]),
        context_cost_scale=st.sampled_from([0, 1, 7]),
        prefix_cache=st.sampled_from([True, True, True, False]),
        depth=st.sampled_from([1, 2, 3]),
        latency_us=st.sampled_from([0, 0, 300]),
        starvation_limit=st.sampled_from([1, 3, 64]),
        has_classes=st.booleans(),
    )
    def start(
        self,
        num_pages: int,
        page_size: int,
        max_num_seqs: int,
        extra_budget: int,
        chunk_size: int,
        max_step_cost: int,
        context_cost_scale: int,
        prefix_cache: bool,
        depth: int,
        latency_us: int,
        starvation_limit: int,
        has_classes: bool,
    ) -> None:
        self.config = SchedulerConfig(
            num_pages=num_pages,
            page_size=page_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + extra_budget,
            max_model_len=64,
            chunk_size=chunk_size,
            enable_prefix_cache=prefix_cache,
            max_in_flight_steps=depth,
            max_step_cost=max_step_cost,
            context_cost_scale=context_cost_scale,
            inter_token_latency_us=latency_us,
            starvation_limit=starvation_limit,
        )
        self.scheduler, self.twin = Scheduler(self.config), Scheduler(self.config)
        self.sequences: dict[int, Sequence] = {}
        self.in_flight: list[Step] = []
        self.slots_of_cache = np.full(num_pages * page_size, -1, dtype=np.int64)
        self.device_table = np.full(self.scheduler.page_table.shape, -1, dtype=np.int32)
        self.first_planned: list[int] = []
        self.next_id = 0
        self.now_us = 0
        self.has_classes = has_classes

    # -- calls ------------------------------------------------------------------------------------------------------------

    @rule(
        shared=st.integers(0, 40),
        own=st.lists(st.integers(0, 2), max_size=12),
        max_new=st.integers(1, 12),
        min_new=st.sampled_from([0, 0, 2]),
        stops=st.booleans(),
        cached=st.sampled_from([True, True, True, False]),
        priority=st.integers(-1, 1),
        tenant=st.integers(0, 2),
        weight=st.integers(1, 3),
        deadline_us=st.sampled_from([-1, -1, 0, 200, 5000]),
    )
    def submit(
        self,
        shared: int,
        own: list[int],
        max_new: int,
        min_new: int,
        stops: bool,
        cached: bool,
        priority: int,
        tenant: int,
        weight: int,
        deadline_us: int,
    ) -> None:
        tokens = [i * i % 5 % 3 for i in range(shared)] + own
        stop_ids = np.array([STOP] if stops else [], dtype=np.int32)
        options = RequestOptions()
        if self.has_classes:
            options = RequestOptions(priority=priority, tenant=tenant, tenant_weight=weight, deadline_us=deadline_us)
        call = (self.next_id, np.array(tokens, dtype=np.int32), max_new, stop_ids, min_new, cached, options)
        status = self.scheduler.submit(*call)
        assert self.twin.submit(*call) == status
        num_pages_needed = -(-(len(tokens) + max_new - 1) // self.config.page_size)
        if not tokens:
            assert status == SubmitStatus.EMPTY
        elif len(tokens) + max_new > self.config.max_model_len:
            assert status == SubmitStatus.TOO_LONG
        elif num_pages_needed > self.config.num_pages:
            assert status == SubmitStatus.NEVER_FITS
        else:
            assert status == SubmitStatus.OK
            self.sequences[self.next_id] = Sequence(tokens, len(tokens), max_new, min_new, stops, cached)
            assert self.scheduler.submit(*call) == SubmitStatus.DUPLICATE
            assert self.twin.submit(*call) == SubmitStatus.DUPLICATE
        self.next_id += 1

    @precondition(lambda self: len(self.in_flight) < self.config.max_in_flight_steps)
    @rule()
    def plan(self) -> None:
        plan, other = self.scheduler.plan(), self.twin.plan()
        assert bool(plan) == bool(other) == (plan.num_requests > 0)
        if not plan:
            assert self.in_flight or not self.scheduler.has_work(), "nothing runs and nothing will"
            return
        arrays = arrays_of(plan, PLAN_ARRAYS)
        assert same(arrays, arrays_of(other, PLAN_ARRAYS)), "two instances, two plans"
        assert (plan.step, plan.num_decodes) == (other.step, other.num_decodes)
        updates = arrays["page_updates"]
        assert len({(slot, index) for slot, index, _ in updates.tolist()}) == len(updates), "one entry set twice"
        self.device_table[updates[:, 0], updates[:, 1]] = updates[:, 2]
        step = Step(plan.step, plan.num_decodes, arrays, self.device_table.copy())
        self.check_plan(plan, step)
        self.in_flight.append(step)

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        num_samples = len(self.in_flight[0].arrays["sample_rows"])
        tokens = st.lists(st.sampled_from([0, 1, 2, 0, 1, 2, STOP]), min_size=num_samples, max_size=num_samples)
        self.finish_step(data.draw(tokens))

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        assume(self.next_id > 0)
        request_id = data.draw(st.integers(0, self.next_id))
        status = self.scheduler.abort(request_id)
        assert self.twin.abort(request_id) == status
        sequence = self.sequences.get(request_id)
        if sequence is None:
            assert status == AbortStatus.NOT_FOUND
        elif sequence.is_live:
            assert status == AbortStatus.OK
            sequence.is_live = False
        else:
            assert status == (AbortStatus.ALREADY_ENDED if self.is_in_flight(request_id) else AbortStatus.NOT_FOUND)

    @rule(passed_us=st.integers(0, 400))
    def advance_clock(self, passed_us: int) -> None:
        self.now_us += passed_us
        self.scheduler.advance_clock(self.now_us)
        self.twin.advance_clock(self.now_us)

    @rule()
    def flush(self) -> None:
        evictable = self.scheduler.stats().evictable_pages
        assert self.scheduler.flush_cache() == self.twin.flush_cache() == evictable
        assert self.scheduler.stats().evictable_pages == 0

    @rule()
    def misuse(self) -> None:
        """A wrong call raises and changes nothing: the invariants and the twin, which did not get the call, would tell."""
        step = self.in_flight[0].number if self.in_flight else 0
        num_samples = len(self.in_flight[0].arrays["sample_rows"]) if self.in_flight else 0
        for number, size, token in ((step + 1, num_samples, 0), (step, num_samples + 1, 0), (step, num_samples, -1)):
            if self.in_flight and number == step and size == 0:
                continue
            with pytest.raises(ValueError, match=r"scheduler\.commit: expected"):
                self.scheduler.commit(number, np.full(size, token if size else 0, dtype=np.int32))
        if len(self.in_flight) == self.config.max_in_flight_steps:
            with pytest.raises(RuntimeError, match=r"scheduler\.plan: expected fewer"):
                self.scheduler.plan()

    # -- checks -----------------------------------------------------------------------------------------------------------

    def is_in_flight(self, request_id: int) -> bool:
        return any(request_id in step.arrays["request_ids"] for step in self.in_flight)

    def check_cost(self, step: Step) -> None:
        """Prompts get what the decodes leave of the cost, at least a quarter; only the first chunk's first token is free of it."""
        limit, scale = self.config.max_step_cost, self.config.context_cost_scale
        if limit == 0:
            return

        def cost(tokens: slice) -> Fraction:
            return sum((1 + (Fraction(int(p), scale) if scale else 0) for p in step.arrays["positions"][tokens]), Fraction(0))

        costs = [cost(tokens) for _, tokens in step.rows()]
        decodes, prefills = costs[: step.num_decodes], costs[step.num_decodes :]
        allowance = max(limit - sum(decodes), Fraction(limit, 4))
        is_one_token = len(prefills) == 1 and step.arrays["query_lens"][-1] == 1
        assert sum(prefills) <= allowance or is_one_token

    def check_plan(self, plan: Plan, step: Step) -> None:
        arrays, page_size = step.arrays, self.config.page_size
        owners = self.scheduler.debug_owners()
        assert plan.num_tokens == len(arrays["token_ids"]) == arrays["query_lens"].sum() <= self.config.max_num_batched_tokens
        assert plan.num_requests <= self.config.max_num_seqs
        assert plan.num_requests <= self.scheduler.stats().num_running
        assert len(set(arrays["slot_mapping"].tolist())) == plan.num_tokens, "two tokens in one slot"
        assert len(set(arrays["slots"].tolist())) == plan.num_requests
        self.check_cost(step)
        samples = dict(zip(arrays["sample_rows"].tolist(), arrays["output_index"].tolist(), strict=True))
        assert list(samples) == sorted(samples)
        for row, (request_id, tokens) in enumerate(step.rows()):
            sequence = self.sequences[request_id]
            assert sequence.is_live, "a request that ended was scheduled"
            positions = arrays["positions"][tokens]
            num_pending = sum(
                1
                for earlier in self.in_flight
                for sample in earlier.arrays["sample_rows"]
                if earlier.arrays["request_ids"][sample] == request_id
            )
            assert (arrays["query_lens"][row] == 1 and row in samples) or row >= step.num_decodes
            if self.config.chunk_size:
                assert arrays["query_lens"][row] <= self.config.chunk_size
            assert np.array_equal(positions, np.arange(positions[0], arrays["seq_lens"][row]))
            known = [sequence.tokens[p] if p < len(sequence.tokens) else -1 for p in positions]
            assert arrays["token_ids"][tokens].tolist() == known
            last_position = len(sequence.tokens) + num_pending - 1
            assert positions[-1] <= last_position
            assert (row in samples) == (positions[-1] == last_position)
            if row in samples:
                assert samples[row] == sequence.num_sampled + num_pending < sequence.max_new
            slot = int(arrays["slots"][row])
            pages = self.scheduler.page_table[slot][positions // page_size]
            assert np.array_equal(pages.astype(np.int64) * page_size + positions % page_size, arrays["slot_mapping"][tokens])
            assert (owners.kind[pages] == 1).all()
            assert (owners.request_id[pages] == request_id).all(), "a write to another's page"
            num_used = -(-int(arrays["seq_lens"][row]) // page_size)
            assert (self.scheduler.page_table[slot][:num_used] >= 0).all()
            assert np.array_equal(step.table[slot][:num_used], self.scheduler.page_table[slot][:num_used]), "device table is stale"
            if not sequence.was_planned:
                sequence.was_planned = True
                is_in_order = not self.first_planned or request_id > self.first_planned[-1]
                assert is_in_order or self.has_classes, "the queue was overtaken"
                self.first_planned.append(request_id)

    def run_on_device(self, step: Step) -> None:
        """Write the step's tokens, then read every live sequence back, through the device's table and through the live one."""
        page_size = self.config.page_size
        for request_id, tokens in step.rows():
            sequence = self.sequences[request_id]
            positions = step.arrays["positions"][tokens]
            values = [sequence.tokens[p] if sequence.is_live and p < len(sequence.tokens) else GARBAGE for p in positions]
            self.slots_of_cache[step.arrays["slot_mapping"][tokens]] = values
        for row, (request_id, _) in enumerate(step.rows()):
            sequence, seq_len = self.sequences[request_id], int(step.arrays["seq_lens"][row])
            if not sequence.is_live:
                continue
            positions = np.arange(seq_len)
            for table in (step.table, self.scheduler.page_table):
                pages = table[step.arrays["slots"][row]][positions // page_size].astype(np.int64)
                read = self.slots_of_cache[pages * page_size + positions % page_size]
                assert read.tolist() == sequence.tokens[:seq_len], "a sequence reads another's keys and values"

    def finish_step(self, tokens: list[int]) -> None:
        step = self.in_flight[0]
        self.run_on_device(step)
        sampled = np.array(tokens, dtype=np.int32)
        time_us = 50 + 20 * len(step.arrays["token_ids"]) + step.number * 7 % 30
        result, other = (one.commit(step.number, sampled, time_us) for one in (self.scheduler, self.twin))
        self.in_flight.pop(0)
        events = arrays_of(result, COMMIT_ARRAYS)
        assert same(events, arrays_of(other, COMMIT_ARRAYS))
        expected = []
        for row, token in zip(step.arrays["sample_rows"], tokens, strict=True):
            request_id = int(step.arrays["request_ids"][row])
            sequence = self.sequences[request_id]
            if not sequence.is_live:
                continue
            index = sequence.num_sampled
            sequence.tokens.append(token)
            reason = 2 if index + 1 == sequence.max_new else 0
            if sequence.stops and token == STOP and index >= sequence.min_new:
                reason = 1
            sequence.is_live = reason == 0
            expected.append((request_id, token, reason, sequence.num_prompt, index))
        names = ("request_ids", "token_ids", "finish_reasons", "num_prompt_tokens", "output_index")
        assert list(zip(*(events[name].tolist() for name in names), strict=True)) == expected
        for request_id, num_cached in zip(events["request_ids"].tolist(), events["num_cached_tokens"].tolist(), strict=True):
            sequence = self.sequences[request_id]
            assert num_cached % self.config.page_size == 0
            assert 0 <= num_cached < sequence.num_prompt, "at least one prompt token is computed"
            assert num_cached == 0 or (sequence.cached and self.config.enable_prefix_cache)

    @invariant()
    def every_page_has_one_owner(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        owners, stats = self.scheduler.debug_owners(), self.scheduler.stats()
        assert (owners.num_owners == 1).all()
        levels = (stats.free_pages, stats.owned_pages, stats.cached_pages)
        assert levels == tuple(int((owners.kind == kind).sum()) for kind in (0, 1, 2))
        assert sum(levels) == self.config.num_pages
        assert stats.evictable_pages <= stats.cached_pages
        # Nobody else may have a page that a step in flight still writes.
        for step in self.in_flight:
            for request_id, tokens in step.rows():
                pages = step.arrays["slot_mapping"][tokens] // self.config.page_size
                assert (owners.request_id[pages] == request_id).all()

    @invariant()
    def counts_agree(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        stats, other = self.scheduler.stats(), self.twin.stats()
        assert [getattr(stats, name) for name in STATS] == [getattr(other, name) for name in STATS]
        num_live = sum(sequence.is_live for sequence in self.sequences.values())
        assert stats.num_running + stats.num_waiting == num_live
        assert stats.num_running <= self.config.max_num_seqs
        assert stats.num_in_flight_steps == len(self.in_flight)
        assert stats.prefix_hit_tokens <= stats.prefix_query_tokens
        in_flight = {int(r) for step in self.in_flight for r in step.arrays["request_ids"]}
        assert self.scheduler.has_work() == (num_live > 0 or bool(in_flight))
        if not self.in_flight:
            assert stats.num_draining == 0, "pages wait for a step that is not there"

    def teardown(self) -> None:
        """All that is left ends in bounded time, and then every page is free or cached."""
        if not hasattr(self, "scheduler"):
            return
        num_steps = 0
        while self.scheduler.has_work() or self.in_flight:
            num_steps += 1
            assert num_steps < 20_000, "livelock"
            if len(self.in_flight) < self.config.max_in_flight_steps:
                before = len(self.in_flight)
                self.plan()
                if len(self.in_flight) > before and len(self.in_flight) < self.config.max_in_flight_steps:
                    continue
            if self.in_flight:
                self.finish_step([0] * len(self.in_flight[0].arrays["sample_rows"]))
            self.every_page_has_one_owner()
        assert self.scheduler.stats().owned_pages == 0
        assert (self.scheduler.page_table == -1).all()
        self.scheduler.flush_cache()
        assert self.scheduler.stats().free_pages == self.config.num_pages


COMMON: dict[str, Any] = {"deadline": None, "suppress_health_check": list(HealthCheck), "print_blob": True}


def test_random_lives() -> None:
    run_state_machine_as_test(ControlPlane, settings=settings(max_examples=400, stateful_step_count=60, **COMMON))


@pytest.mark.slow
def test_many_long_random_lives() -> None:
    run_state_machine_as_test(ControlPlane, settings=settings(max_examples=2000, stateful_step_count=120, **COMMON))
