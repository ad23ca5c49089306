"""Who is served when: priorities, deadlines, tenants, latency of streams, expected lengths. A fake device tells the time."""

from __future__ import annotations

import zlib
from collections import defaultdict
from typing import Any

import numpy as np
import pytest

from tokenspeed_engine.scheduler import Plan, RequestOptions, Scheduler, SchedulerConfig, SubmitStatus

NO_STOP = np.empty(0, dtype=np.int32)


class Device:
    """Runs steps in order; one takes base_us + decode_us a decode + prefill_us a prompt token. Tokens depend on all before them."""

    def __init__(self, *, depth: int = 1, base_us: int = 1000, decode_us: int = 10, prefill_us: int = 10, **values: Any) -> None:
        sizes = {
            "max_in_flight_steps": max(depth, 2),
            "num_pages": 64,
            "page_size": 16,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 512,
            "max_model_len": 1024,
        }
        self.scheduler = Scheduler(SchedulerConfig(**{**sizes, **values}))
        self.depth, self.costs = depth, (base_us, decode_us, prefill_us)
        self.cache = np.full(self.scheduler.config.num_pages * self.scheduler.config.page_size, -1, dtype=np.int32)
        self.prompts: dict[int, np.ndarray] = {}
        self.max_new: dict[int, int] = {}
        self.pending: dict[int, int] = {}
        self.in_flight: list[tuple[int, np.ndarray, int]] = []
        self.outputs: dict[int, list[int]] = defaultdict(list)
        self.token_times: dict[int, list[int]] = defaultdict(list)
        self.started: list[int] = []
        self.ended: list[int] = []
        self.now_us = 0

    def submit(self, request_id: int, length: int, max_new: int, **options: int) -> None:
        self.prompts[request_id] = np.random.default_rng(request_id).integers(0, 50, length).astype(np.int32)
        self.max_new[request_id] = max_new
        status = self.scheduler.submit(request_id, self.prompts[request_id], max_new, NO_STOP, options=RequestOptions(**options))
        assert status == SubmitStatus.OK

    def run(self, plan: Plan) -> np.ndarray:
        page_size, sampled = self.scheduler.config.page_size, []
        for row, request_id in enumerate(plan.request_ids.tolist()):
            tokens = slice(int(plan.cu_query_lens[row]), int(plan.cu_query_lens[row + 1]))
            ids = plan.token_ids[tokens].copy()
            ids[ids < 0] = self.pending.get(request_id, 0)
            self.cache[plan.slot_mapping[tokens]] = ids
            if request_id not in self.started:
                self.started.append(request_id)
        for row in plan.sample_rows.tolist():
            positions = np.arange(plan.seq_lens[row])
            pages = self.scheduler.page_table[plan.slots[row]][positions // page_size].astype(np.int64)
            token = zlib.crc32(self.cache[pages * page_size + positions % page_size].tobytes()) % 50
            self.pending[int(plan.request_ids[row])] = token
            sampled.append(token)
        return np.array(sampled, dtype=np.int32)

    def step(self) -> Plan | None:
        plan = self.scheduler.plan() if len(self.in_flight) < self.depth else None
        if plan:
            stats = self.scheduler.stats()
            assert plan.num_requests <= stats.num_running, "a row of a request that does not run"
            assert len(set(plan.request_ids.tolist())) == plan.num_requests
            base, decode, prefill = self.costs
            time_us = base + decode * plan.num_decodes + prefill * (plan.num_tokens - plan.num_decodes)
            self.in_flight.append((plan.step, self.run(plan), time_us))
            if len(self.in_flight) < self.depth:
                return plan
        if self.in_flight:
            number, sampled, time_us = self.in_flight.pop(0)
            self.now_us += time_us
            self.scheduler.advance_clock(self.now_us)
            events = self.scheduler.commit(number, sampled, time_us)
            for request_id, token, reason in zip(
                events.request_ids.tolist(), events.token_ids.tolist(), events.finish_reasons.tolist(), strict=True
            ):
                self.outputs[request_id].append(token)
                self.token_times[request_id].append(self.now_us)
                if reason:
                    self.ended.append(request_id)
        return plan

    def finish(self, limit: int = 20_000) -> None:
        for _ in range(limit):
            if not self.scheduler.has_work():
                for request_id in self.outputs:
                    assert self.outputs[request_id] == self.undisturbed(request_id)
                return
            self.step()
        raise AssertionError("livelock")

    def undisturbed(self, request_id: int) -> list[int]:
        """What the request gives when it runs alone."""
        sequence = self.prompts[request_id].tolist()
        for _ in range(self.max_new[request_id]):
            sequence.append(zlib.crc32(np.array(sequence, dtype=np.int32).tobytes()) % 50)
        return sequence[len(self.prompts[request_id]) :]


# -- priority -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("num_seqs", [1, 3])
def test_a_better_priority_takes_the_row_of_a_worse_one(depth: int, num_seqs: int) -> None:
    """vllm-project/vllm#40004: the limit is max_num_seqs, not memory."""
    device = Device(depth=depth, max_num_seqs=num_seqs)
    for request_id in range(num_seqs):
        device.submit(request_id, 20, 64, priority=1)
    for _ in range(10):
        device.step()
    device.submit(100, 20, 4, priority=0)
    device.finish()
    assert device.ended[0] == 100
    assert device.scheduler.stats().num_preemptions == 1
    assert device.token_times[100][0] < min(times[15] for times in device.token_times.values() if len(times) > 15)


def test_equal_priorities_do_not_preempt_each_other() -> None:
    """The second half of the report: two jobs alike and a pool for one and a half; each ends, and nothing goes round in circles."""
    device = Device(num_pages=6, page_size=4, max_num_seqs=2, max_model_len=64)
    device.submit(1, 4, 12)
    device.submit(2, 4, 12)
    device.finish(200)
    assert device.scheduler.stats().num_preemptions == 0
    assert device.ended == [1, 2]


def test_a_better_priority_takes_pages_only_when_they_are_enough() -> None:
    device = Device(num_pages=11, page_size=4, max_model_len=40)
    device.submit(1, 12, 8, priority=0)
    device.submit(2, 8, 8, priority=5)
    for _ in range(3):
        device.step()
    device.submit(3, 36, 2, priority=1)  # with 1 running it would not fit, whatever 2 gives
    device.step()
    assert device.scheduler.stats().num_preemptions == 0
    device.submit(4, 20, 2, priority=-1)
    device.step()
    assert device.scheduler.stats().num_preemptions == 1
    device.finish()
    assert device.ended.index(4) < device.ended.index(2)


def test_a_long_prompt_of_a_worse_priority_does_not_hold_up_a_better_one() -> None:
    device = Device(max_num_batched_tokens=64)
    device.submit(1, 900, 2, priority=1)
    device.step()
    device.submit(2, 30, 2)
    plan = device.step()
    assert plan is not None
    assert plan.request_ids.tolist() == [2, 1], "the better one first, the rest of the budget to the other"
    device.finish()


@pytest.mark.parametrize("limit", [1, 4, 16])
def test_a_stream_of_better_priorities_starves_nobody(limit: int) -> None:
    """One row, and always two of the better class waiting: the other is admitted after `limit` of them, runs, and stays."""
    device = Device(max_num_seqs=1, starvation_limit=limit)
    device.submit(0, 20, 6, priority=1)
    device.step()
    for request_id in range(1, 4 * limit + 40):
        device.submit(request_id, 20, 2)
        device.submit(request_id + 10_000, 20, 2)
        for _ in range(2):
            device.step()
        if 0 in device.ended:
            break
    assert 0 in device.ended
    assert len(device.ended) <= limit + 3
    assert device.scheduler.stats().num_preemptions == 1
    device.finish()


def test_deadlines_go_first_while_they_can_be_met() -> None:
    device = Device(max_num_seqs=1)
    device.submit(0, 20, 4)
    device.step()
    device.submit(1, 20, 2)
    device.submit(2, 20, 2, deadline_us=900_000)
    device.submit(3, 20, 2, deadline_us=500_000)
    device.submit(4, 20, 2, deadline_us=1000)  # gone by when the row is free
    device.finish()
    assert device.started == [0, 3, 2, 1, 4]


# -- tenants --------------------------------------------------------------------------------------------------------------


def test_tenants_get_their_weights_share() -> None:
    """Two tenants with endless work, weights 1 and 3: served tokens as 1 to 3, though the lighter one sends larger requests."""
    device = Device(max_num_seqs=2, num_pages=256, starvation_limit=1000)
    owner: dict[int, tuple[int, int]] = {}
    for _ in range(3000):
        for tenant, weight, length in ((1, 1, 300), (2, 3, 40)):
            while sum(owner[i][0] == tenant for i in owner.keys() - set(device.started)) < 3:  # always some waiting
                request_id = len(owner)
                device.submit(request_id, length, 10, tenant=tenant, tenant_weight=weight)
                owner[request_id] = (tenant, length + 9)
        device.step()
    served = {tenant: sum(cost for i, (t, cost) in owner.items() if t == tenant and i in device.ended) for tenant in (1, 2)}
    assert 0.29 < served[1] / served[2] < 0.38
    for request_id in [i for i in owner if i not in device.ended]:
        device.scheduler.abort(request_id)


def test_a_flood_of_long_prompts_does_not_hold_up_another_tenant() -> None:
    device = Device(max_num_batched_tokens=64, num_pages=1024)
    for request_id in range(4):
        device.submit(request_id, 900, 4, tenant=1)
    for _ in range(5):
        device.step()
    device.submit(9, 40, 4, tenant=2)
    plan = device.step()
    assert plan is not None
    assert 9 in plan.request_ids.tolist()
    device.finish()
    assert device.ended[0] == 9


def test_one_tenant_alone_is_first_come_first_served() -> None:
    device = Device(max_num_seqs=2)
    for request_id in range(12):
        device.submit(request_id, 20 + request_id * 7 % 50, 3, tenant=5, tenant_weight=2)
    device.finish()
    assert device.started == list(range(12))


# -- latency --------------------------------------------------------------------------------------------------------------


def longest_gap_us(device: Device, request_ids: range) -> int:
    """Longest time between two tokens of a stream, once step times are known."""
    return max(int(np.diff(device.token_times[request_id])[5:].max()) for request_id in request_ids)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_long_prompt_does_not_stall_running_streams(depth: int) -> None:
    """50,000 tokens arrive while 16 streams run: without a target a step takes 83 ms, with one of 20 ms it takes that."""
    gaps = {}
    for target_us in (0, 20_000):
        device = Device(
            depth=depth,
            base_us=2000,
            decode_us=30,
            num_pages=5000,
            max_num_seqs=32,
            max_num_batched_tokens=8192,
            max_model_len=60_000,
            inter_token_latency_us=target_us,
        )
        device.submit(99, 300, 2)  # teaches what prompt tokens cost, as the first request of a server does
        for _ in range(6):
            device.step()
        for request_id in range(16):
            device.submit(request_id, 30, 200)
        for _ in range(20):
            device.step()
        device.submit(100, 50_000, 2)
        device.finish()
        gaps[target_us] = longest_gap_us(device, range(16))
        assert device.ended.index(100) < len(device.ended) - (1 if target_us == 0 else 0)
    assert gaps[0] > 80_000
    assert gaps[20_000] < 24_000


def test_prompts_get_on_beside_decodes_that_take_all_the_time() -> None:
    device = Device(
        base_us=50_000,
        decode_us=100,
        num_pages=5000,
        max_num_batched_tokens=8192,
        max_model_len=60_000,
        inter_token_latency_us=10_000,
    )
    device.submit(1, 30, 500)
    for _ in range(20):
        device.step()
    device.submit(2, 5000, 1)
    num_steps = 0
    while 2 not in device.ended:
        device.step()
        num_steps += 1
        assert num_steps < 60, "at least a quarter of 10 ms, 250 tokens, in a step"
    device.finish()


# -- expected lengths -----------------------------------------------------------------------------------------------------


def test_after_a_few_outputs_no_more_are_admitted_than_the_pool_will_hold() -> None:
    device, next_id, counts = (
        Device(num_pages=96, page_size=4, max_num_seqs=16, max_model_len=400, enable_prefix_cache=False),
        0,
        [],
    )
    for _ in range(6):
        for _ in range(12):
            device.submit(next_id, 8, 80)
            next_id += 1
        device.finish()
        counts.append(device.scheduler.stats().num_retractions)
    assert counts[0] > 0, "with nothing known, too many are admitted"
    assert counts[-1] == counts[0]


@pytest.mark.parametrize(("tenant", "num_started"), [(1, 2), (2, 6)])
def test_lengths_are_learnt_for_each_tenant(tenant: int, num_started: int) -> None:
    """Beside a long output the pool holds one more of its kind, or five of a tenant whose outputs are short."""
    device = Device(num_pages=96, page_size=4, max_num_seqs=16, max_model_len=400, enable_prefix_cache=False)
    for request_id in range(6):
        device.submit(request_id, 8, 160, tenant=1)
        device.submit(request_id + 50, 8, 8, tenant=2)
        device.finish()
    device.submit(100, 8, 160, tenant=1)
    for request_id in range(101, 106):
        device.submit(request_id, 8, 160, tenant=tenant)  # it may take as long as it likes: what counts is what such ones do
    device.step()
    assert sum(request_id >= 100 for request_id in device.started) == num_started
    device.finish()


@pytest.mark.parametrize(("second", "third", "victim"), [(1, 2, 2), (2, 1, 3)])
def test_the_victim_is_the_one_that_gives_most_for_what_it_costs(second: int, third: int, victim: int) -> None:
    """Two with equal contexts cost the same: the one that is expected to hold its pages longer gives way, whichever came last."""
    device = Device(num_pages=52, page_size=4, max_model_len=400, enable_prefix_cache=False)
    for tenant, length in ((0, 8), (1, 60), (2, 20)):
        device.submit(50 + tenant, 4, length, tenant=tenant)
        device.finish()
    for request_id, tenant in ((1, 0), (2, second), (3, third)):
        device.submit(request_id, 40, 100, tenant=tenant)  # all three longer than expected
    while device.scheduler.has_work() and device.scheduler.stats().num_retractions == 0:
        running = device.step()
    assert running is not None
    assert sorted({1, 2, 3} - set(running.request_ids.tolist())) == [victim]
    device.finish()


def test_a_worse_priority_is_the_victim_whatever_it_costs() -> None:
    device = Device(num_pages=24, page_size=4, max_model_len=400, enable_prefix_cache=False)
    device.submit(1, 16, 40, priority=0)
    device.submit(2, 16, 40, priority=1)
    device.submit(3, 16, 40, priority=0)
    device.finish()
    assert device.scheduler.stats().num_retractions > 0
    assert device.ended[-1] == 2
