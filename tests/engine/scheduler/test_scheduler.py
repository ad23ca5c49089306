"""The rules of the control plane, one by one, with a fake device whose next token depends on all that its cache holds."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import numpy as np
import pytest

from tokenspeed_engine.scheduler import AbortStatus, Plan, Scheduler, SchedulerConfig, SubmitStatus

VOCAB_SIZE = 50
NO_STOP = np.empty(0, dtype=np.int32)


def make(**values: int | bool) -> Scheduler:
    defaults = {"num_pages": 64, "page_size": 16, "max_num_seqs": 8, "max_num_batched_tokens": 512, "max_model_len": 1024}
    return Scheduler(SchedulerConfig(**{**defaults, **values}))  # type: ignore[arg-type]


def prompt(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB_SIZE, length).astype(np.int32)


class Device:
    """Runs steps in order like an accelerator: a cache of token ids, and tokens of earlier steps known to it before the host."""

    def __init__(self, scheduler: Scheduler, depth: int = 1) -> None:
        self.scheduler, self.depth = scheduler, depth
        self.page_size = scheduler.config.page_size
        self.cache = np.full(scheduler.config.num_pages * self.page_size, -1, dtype=np.int32)
        self.pending: dict[int, int] = {}
        self.in_flight: list[tuple[int, np.ndarray]] = []
        self.outputs: dict[int, list[int]] = {}
        self.reasons: dict[int, int] = {}
        self.cached: dict[int, int] = {}
        self.num_steps = 0
        self.most_requests = 0

    def run(self, plan: Plan) -> np.ndarray:
        """Write, attend, sample: the token is a checksum of the whole sequence as read through the page table."""
        for row, request_id in enumerate(plan.request_ids.tolist()):
            tokens = slice(int(plan.cu_query_lens[row]), int(plan.cu_query_lens[row + 1]))
            ids = plan.token_ids[tokens].copy()
            ids[ids < 0] = self.pending.get(request_id, 0)
            self.cache[plan.slot_mapping[tokens]] = ids
        sampled = []
        for row in plan.sample_rows.tolist():
            positions = np.arange(plan.seq_lens[row])
            pages = self.scheduler.page_table[plan.slots[row]][positions // self.page_size].astype(np.int64)
            content = self.cache[pages * self.page_size + positions % self.page_size]
            token = zlib.crc32(content.tobytes()) % VOCAB_SIZE
            self.pending[int(plan.request_ids[row])] = token
            sampled.append(token)
        return np.array(sampled, dtype=np.int32)

    def step(self) -> Plan | None:
        """Plan and run one more step when there is room, else commit the oldest."""
        plan = self.scheduler.plan() if len(self.in_flight) < self.depth else None
        if plan:
            self.in_flight.append((plan.step, self.run(plan)))
            self.num_steps += 1
            self.most_requests = max(self.most_requests, plan.num_requests)
            if len(self.in_flight) < self.depth:
                return plan
        if self.in_flight:
            self.commit()
        return plan

    def commit(self) -> None:
        result = self.scheduler.commit(*self.in_flight.pop(0))
        names = (result.request_ids, result.token_ids, result.finish_reasons, result.num_cached_tokens)
        for request_id, token, reason, cached in zip(*(name.tolist() for name in names), strict=True):
            self.outputs.setdefault(request_id, []).append(token)
            self.cached[request_id] = cached
            if reason:
                self.reasons[request_id] = reason

    def finish(self, limit: int = 20_000) -> dict[int, list[int]]:
        for _ in range(limit):
            if not self.scheduler.has_work():
                return self.outputs
            self.step()
        raise AssertionError("livelock")


def expected_output(ids: Iterable[int], max_new: int) -> list[int]:
    sequence = list(ids)
    start = len(sequence)
    while len(sequence) < start + max_new:
        sequence.append(zlib.crc32(np.array(sequence, dtype=np.int32).tobytes()) % VOCAB_SIZE)
    return sequence[start:]


# -- one truth, whatever the sizes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("chunk_size", [0, 7, 64])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_output_does_not_depend_on_sizes(depth: int, page_size: int, chunk_size: int, prefix_cache: bool) -> None:
    scheduler = make(
        num_pages=-(-160 // page_size) * 2,  # room for about two of the eight: most settings retract
        page_size=page_size,
        chunk_size=chunk_size,
        max_num_batched_tokens=96,
        enable_prefix_cache=prefix_cache,
        max_in_flight_steps=depth,
    )
    device = Device(scheduler, depth)
    common = prompt(40)
    prompts = [np.concatenate([common[: 40 if i % 2 else 17], prompt(9 * i, seed=i + 1)]) for i in range(8)]
    for i, ids in enumerate(prompts):
        assert scheduler.submit(i, ids, 30 + 5 * i, NO_STOP) == SubmitStatus.OK
    outputs = device.finish()
    for i, ids in enumerate(prompts):
        assert outputs[i] == expected_output(ids, 30 + 5 * i), f"request {i}"
        assert device.reasons[i] == 2
    assert scheduler.stats().owned_pages == 0


def test_retraction_happens_and_changes_nothing() -> None:
    scheduler = make(num_pages=12, page_size=4, max_model_len=48)
    device = Device(scheduler, depth=1)
    for i in range(4):
        scheduler.submit(i, prompt(8, seed=i), 32, NO_STOP)
    outputs = device.finish()
    assert scheduler.stats().num_retractions > 0
    assert scheduler.stats().recomputed_tokens > 0
    assert all(outputs[i] == expected_output(prompt(8, seed=i), 32) for i in range(4))


# -- public reports -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "max_new", "status"),
    [
        (100, 1, SubmitStatus.NEVER_FITS),
        (48, 1, SubmitStatus.OK),  # (pages - 1) * page
        (63, 1, SubmitStatus.OK),  # pages * page - 1
        (64, 1, SubmitStatus.OK),  # pages * page: the one sampled token is never computed
        (63, 2, SubmitStatus.OK),
        (64, 2, SubmitStatus.NEVER_FITS),
        (65, 1, SubmitStatus.NEVER_FITS),
        (48, 17, SubmitStatus.OK),
        (48, 18, SubmitStatus.NEVER_FITS),
        (1, 64, SubmitStatus.OK),
        (1, 65, SubmitStatus.NEVER_FITS),
    ],
)
def test_a_request_that_can_never_fit_is_refused_and_blocks_nobody(length: int, max_new: int, status: SubmitStatus) -> None:
    """Case C1: a pool of 4 pages of 16 under a context of 4096."""
    scheduler = make(num_pages=4, max_model_len=4096, max_num_batched_tokens=64)
    device = Device(scheduler)
    assert scheduler.submit(1, prompt(length), max_new, NO_STOP) == status
    assert scheduler.submit(2, prompt(10, seed=1), 5, NO_STOP) == SubmitStatus.OK
    outputs = device.finish(limit=200)
    assert outputs[2] == expected_output(prompt(10, seed=1), 5)
    assert (1 in outputs) == (status == SubmitStatus.OK)
    if status == SubmitStatus.OK:
        assert outputs[1] == expected_output(prompt(length), max_new)


@pytest.mark.parametrize("num_pages", [6, 7, 8])
def test_two_jobs_and_a_pool_for_one_and_a_half(num_pages: int) -> None:
    """Case C4: no livelock, undisturbed texts, never more scheduled than runs. No priorities: first come, first served."""
    for max_num_seqs in (1, 2):
        scheduler = make(num_pages=num_pages, page_size=4, max_num_seqs=max_num_seqs, max_model_len=20)
        device = Device(scheduler)
        for i in (1, 2):
            assert scheduler.submit(i, prompt(4, seed=i), 16, NO_STOP) == SubmitStatus.OK
        first_ends = []
        while scheduler.has_work():
            plan = device.step()
            assert device.num_steps < 200
            assert plan is None or plan.num_requests <= max_num_seqs
            first_ends += [i for i in (1, 2) if i in device.reasons and i not in first_ends]
        assert first_ends == [1, 2]
        assert all(device.outputs[i] == expected_output(prompt(4, seed=i), 16) for i in (1, 2))


def test_tokens_are_counted_after_the_prefix_hit() -> None:
    """Case Z7: 465 tokens of which 256 are cached are 209 tokens of work."""
    scheduler = make(num_pages=128)
    device = Device(scheduler)
    ids = prompt(465)
    scheduler.submit(1, ids[:256], 1, NO_STOP)
    device.finish()
    scheduler.submit(2, ids, 1, NO_STOP)
    plan = scheduler.plan()
    assert plan.num_tokens == 209
    assert plan.query_lens.tolist() == [209]
    assert plan.seq_lens.tolist() == [465]
    assert plan.positions.tolist() == list(range(256, 465))
    assert np.array_equal(plan.token_ids, ids[256:])
    result = scheduler.commit(plan.step, np.zeros(1, dtype=np.int32))
    assert result.num_cached_tokens.tolist() == [256]
    assert scheduler.stats().prefix_query_tokens == 256 + 465
    assert scheduler.stats().prefix_hit_tokens == 256


def test_a_page_that_a_late_step_may_write_goes_to_nobody() -> None:
    scheduler = make(num_pages=9, page_size=4, max_num_batched_tokens=16)
    scheduler.submit(1, prompt(16), 4, NO_STOP)
    late = scheduler.plan()
    written = set((late.slot_mapping // 4).tolist())
    assert scheduler.abort(1) == AbortStatus.OK
    scheduler.submit(2, prompt(16, seed=2), 4, NO_STOP)
    other = scheduler.plan()
    assert not written & set((other.slot_mapping // 4).tolist())
    assert scheduler.stats().free_pages == 1
    assert scheduler.commit(late.step, np.zeros(1, dtype=np.int32)).num_events == 0
    assert scheduler.stats().free_pages == 5


# -- prefix cache ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_full_hit_computes_the_last_page_again(page_size: int) -> None:
    scheduler = make(num_pages=256, page_size=page_size)
    device = Device(scheduler)
    for i in (1, 2):
        scheduler.submit(i, prompt(32), 3, NO_STOP)
        device.finish()
    assert device.cached[2] == 32 - page_size
    assert device.outputs[1] == device.outputs[2] == expected_output(prompt(32), 3)


def test_the_next_turn_finds_prompt_and_answer() -> None:
    scheduler = make(page_size=4)
    device = Device(scheduler)
    scheduler.submit(1, prompt(10), 11, NO_STOP)
    answer = device.finish()[1]
    turn = np.concatenate([prompt(10), np.array(answer, dtype=np.int32), prompt(6, seed=9)])
    scheduler.submit(2, turn, 4, NO_STOP)
    assert device.finish()[2] == expected_output(turn, 4)
    assert device.cached[2] == 20  # 10 + 11 tokens, the last never computed: five full pages


def test_equal_prompts_at_the_same_time_end_on_the_same_pages() -> None:
    scheduler = make(page_size=4)
    device = Device(scheduler)
    for i in range(3):
        scheduler.submit(i, prompt(12), 2, NO_STOP)
    plan = device.step()
    assert plan is not None
    assert plan.num_tokens == 36  # nothing to share before the first commit
    tables = scheduler.page_table[:3, :3]
    assert (tables == tables[0]).all()
    assert scheduler.stats().cached_pages == 3
    outputs = device.finish()
    assert outputs[0] == outputs[1] == outputs[2] == expected_output(prompt(12), 2)


def test_a_plan_sets_each_entry_of_the_page_table_once() -> None:
    """Devices apply updates in any order. Here the row of an aborted request, just redirected, goes to another one."""
    scheduler = make(page_size=4)
    for i in (1, 2):
        scheduler.submit(i, prompt(12), 4, NO_STOP)
    plan = scheduler.plan()
    scheduler.commit(plan.step, np.zeros(2, dtype=np.int32))  # the second request's pages are replaced by the first one's
    assert scheduler.abort(2) == AbortStatus.OK
    scheduler.submit(3, prompt(12, seed=3), 4, NO_STOP)
    plan = scheduler.plan()
    updates = {(slot, index): page for slot, index, page in plan.page_updates.tolist()}
    assert len(updates) == len(plan.page_updates)
    assert plan.request_ids.tolist() == [1, 3]
    assert [updates[int(plan.slots[1]), index] for index in range(3)] == scheduler.page_table[plan.slots[1]][:3].tolist()


def test_no_page_is_shared_before_its_step_is_committed() -> None:
    scheduler = make(page_size=4, max_in_flight_steps=2)
    scheduler.submit(1, prompt(12), 2, NO_STOP)
    first = scheduler.plan()
    scheduler.submit(2, prompt(12), 2, NO_STOP)
    second = scheduler.plan()
    assert second.request_ids.tolist() == [1, 2]
    assert second.query_lens.tolist() == [1, 12]
    assert not set(first.slot_mapping.tolist()) & set(second.slot_mapping.tolist())


def test_without_the_cache_a_request_computes_its_whole_prompt_and_still_serves_others() -> None:
    scheduler = make(page_size=4)
    device = Device(scheduler)
    for i, use in enumerate((True, False, True)):
        scheduler.submit(i, prompt(12), 1, NO_STOP, use_prefix_cache=use)
        device.finish()
    assert device.cached == {0: 0, 1: 0, 2: 8}
    assert scheduler.stats().prefix_query_tokens == 24
    scheduler.flush_cache()
    scheduler.submit(3, prompt(12), 1, NO_STOP, use_prefix_cache=False)
    device.finish()
    scheduler.submit(4, prompt(12), 1, NO_STOP)
    device.finish()
    assert device.cached[3] == 0
    assert device.cached[4] == 8


def test_flush_keeps_pages_in_use() -> None:
    scheduler = make(page_size=4)
    device = Device(scheduler)
    scheduler.submit(1, prompt(8, seed=1), 1, NO_STOP)
    device.finish()
    scheduler.submit(2, prompt(8, seed=2), 5, NO_STOP)
    device.step()
    assert scheduler.flush_cache() == 2
    assert scheduler.stats().cached_pages == 2
    assert device.finish()[2] == expected_output(prompt(8, seed=2), 5)


def test_least_recently_used_pages_go_first() -> None:
    scheduler = make(num_pages=8, page_size=4, max_model_len=32)
    device = Device(scheduler)
    for i in (1, 2, 1):  # 2 is used least recently
        scheduler.submit(10 * device.num_steps + i, prompt(12, seed=i), 1, NO_STOP)
        device.finish()
    scheduler.submit(100, prompt(17, seed=3), 1, NO_STOP)  # five pages: two are free, three of the cached go
    device.finish()
    scheduler.submit(101, prompt(12, seed=1), 1, NO_STOP)
    device.finish()
    assert device.cached[101] == 8
    assert scheduler.stats().num_evicted_pages >= 3


# -- batches --------------------------------------------------------------------------------------------------------------


def test_prefill_and_decode_share_a_step_and_decodes_come_first() -> None:
    scheduler = make(max_num_batched_tokens=40, chunk_size=0)
    device = Device(scheduler)
    scheduler.submit(1, prompt(30, seed=1), 10, NO_STOP)
    device.step()
    scheduler.submit(2, prompt(100, seed=2), 10, NO_STOP)
    plan = scheduler.plan()
    assert plan.num_decodes == 1
    assert plan.request_ids.tolist() == [1, 2]
    assert plan.query_lens.tolist() == [1, 39]
    assert plan.cu_query_lens.tolist() == [0, 1, 40]
    assert plan.sample_rows.tolist() == [0]
    assert plan.output_index.tolist() == [1]


def test_chunks_are_cut_per_request_and_the_rest_of_the_budget_goes_on() -> None:
    scheduler = make(max_num_batched_tokens=40, chunk_size=16)
    for i in (1, 2, 3):
        scheduler.submit(i, prompt(30, seed=i), 4, NO_STOP)
    plan = scheduler.plan()
    assert plan.request_ids.tolist() == [1, 2, 3]
    assert plan.query_lens.tolist() == [16, 16, 8]
    assert plan.num_samples == 0


def test_chunks_shrink_as_their_context_grows() -> None:
    sizes = {"num_pages": 64, "page_size": 4, "max_num_batched_tokens": 64, "max_model_len": 256}
    scheduler = make(**sizes, max_step_cost=16, context_cost_scale=16)
    device = Device(scheduler)
    scheduler.submit(1, prompt(100, seed=1), 1, NO_STOP)
    chunks = []
    while scheduler.has_work():
        plan = device.step()
        assert plan is not None
        chunks.append(int(plan.query_lens[0]))
        positions = plan.positions.tolist()
        assert sum(1 + position / 16 for position in positions) <= 16
        after = positions[-1] + 1  # as many as can be: one more would cost too much, unless the prompt is over
        assert sum(1 + position / 16 for position in [*positions, after]) > 16 or after == 100
    assert sum(chunks) == 100
    assert chunks == sorted(chunks[:-1], reverse=True) + chunks[-1:]
    assert chunks[0] > 3 * chunks[-2]


def test_prompts_share_what_decodes_leave_of_a_step_and_never_less_than_a_quarter() -> None:
    scheduler = make(num_pages=256, page_size=4, max_num_batched_tokens=64, max_model_len=256, max_step_cost=16, max_num_seqs=16)
    device = Device(scheduler)
    for i in range(6):
        scheduler.submit(i, prompt(2, seed=i), 40, NO_STOP)
    device.step()
    scheduler.submit(6, prompt(60, seed=6), 40, NO_STOP)
    plan = device.step()
    assert plan is not None
    assert plan.query_lens.tolist() == [1] * 6 + [10]
    while plan is None or plan.num_decodes < 7:
        plan = device.step()
    for i in range(7, 15):
        scheduler.submit(i, prompt(1, seed=i), 40, NO_STOP)
    while plan is None or plan.num_decodes < 15:
        plan = device.step()
    scheduler.submit(15, prompt(60, seed=15), 40, NO_STOP)
    plan = device.step()
    assert plan is not None
    assert plan.query_lens.tolist() == [1] * 15 + [4]


def test_a_token_dearer_than_a_whole_step_still_gets_its_turn() -> None:
    scheduler = make(num_pages=64, page_size=4, max_model_len=128, max_step_cost=2, context_cost_scale=1)
    device = Device(scheduler)
    scheduler.submit(1, prompt(50, seed=1), 1, NO_STOP)
    steps = 0
    while scheduler.has_work():
        device.step()
        steps += 1
    assert steps == 50


def test_the_head_of_the_queue_is_not_overtaken() -> None:
    scheduler = make(num_pages=8, page_size=4, max_model_len=32)
    device = Device(scheduler)
    scheduler.submit(1, prompt(16, seed=1), 8, NO_STOP)
    device.step()
    scheduler.submit(2, prompt(20, seed=2), 4, NO_STOP)  # does not fit beside 1
    scheduler.submit(3, prompt(2, seed=3), 2, NO_STOP)  # would
    order = []
    while scheduler.has_work():
        plan = device.step()
        order += [i for i in (plan.request_ids.tolist() if plan else []) if i not in order]
    assert order == [1, 2, 3]


def test_a_cheaper_prompt_does_not_overtake_one_whose_context_is_too_dear_for_the_rest_of_a_step() -> None:
    scheduler = make(num_pages=16, page_size=2, max_num_seqs=3, max_model_len=16, max_step_cost=6, context_cost_scale=1)
    device = Device(scheduler)
    shared = prompt(4, seed=1)
    scheduler.submit(1, shared, 1, NO_STOP)
    scheduler.submit(2, shared[:3], 1, NO_STOP)  # two of its tokens are cached by then: the third costs 1 + 2
    scheduler.submit(3, prompt(1, seed=3), 1, NO_STOP)  # costs 1
    plans = []
    while scheduler.has_work():
        plan = device.step()
        plans += [plan.request_ids.tolist()] if plan else []
    # The first chunk of 1 costs 1 + 2 + 3, its second 4, which leaves 2.
    assert plans == [[1], [1], [2, 3]]


def scheduled(plan: Plan) -> list[int]:
    return plan.request_ids.tolist() if plan else []


def test_admission_leaves_a_page_for_each_running_decode() -> None:
    scheduler = make(num_pages=8, page_size=4, max_model_len=32)
    device = Device(scheduler)
    scheduler.submit(1, prompt(4, seed=1), 9, NO_STOP)
    device.step()
    device.step()  # two pages now, six are free
    scheduler.submit(2, prompt(23, seed=2), 2, NO_STOP)  # needs six
    assert scheduled(device.step()) == [1]
    device.finish()
    assert scheduler.stats().num_retractions == 0


@pytest.mark.parametrize(("length", "fits"), [(7, True), (11, False)])
def test_admission_counts_on_no_page_that_was_promised(length: int, fits: bool) -> None:
    scheduler = make(num_pages=8, page_size=4, chunk_size=4, max_model_len=32)
    device = Device(scheduler)
    scheduler.submit(1, prompt(23, seed=1), 2, NO_STOP)  # needs six pages, takes one in its first step
    scheduler.submit(2, prompt(length, seed=2), 2, NO_STOP)
    assert scheduled(device.step()) == ([1, 2] if fits else [1])
    device.finish()
    assert scheduler.stats().num_retractions == 0


def test_admission_counts_cached_pages_that_it_would_lock() -> None:
    scheduler = make(num_pages=12, page_size=4, max_model_len=32)
    device = Device(scheduler)
    scheduler.submit(1, prompt(16, seed=1), 1, NO_STOP)
    device.finish()  # four cached pages that nobody uses
    scheduler.submit(2, prompt(16, seed=2), 6, NO_STOP)
    device.step()
    device.step()  # five pages, three are free
    turn = np.concatenate([prompt(16, seed=1), prompt(8, seed=3)])
    scheduler.submit(3, turn, 4, NO_STOP)  # seven pages: four are cached, three are free, and one of those is the other's next
    while 2 not in device.reasons:
        assert 3 not in scheduled(device.step())
    assert device.finish()[3] == expected_output(turn, 4)
    assert scheduler.stats().num_retractions == 0


def test_a_stream_of_short_requests_does_not_starve_a_long_one() -> None:
    scheduler = make(num_pages=32, page_size=4, max_num_seqs=4, max_num_batched_tokens=8, max_model_len=128)
    device = Device(scheduler)
    scheduler.submit(0, prompt(4, seed=0), 4, NO_STOP)
    scheduler.submit(1, prompt(100, seed=1), 4, NO_STOP)
    for i in range(2, 400):
        scheduler.submit(i, prompt(4, seed=i), 4, NO_STOP)
        device.step()
        if 1 in device.reasons:
            break
    assert device.outputs[1] == expected_output(prompt(100, seed=1), 4)
    assert i < 60


def test_a_step_can_be_planned_before_the_token_is_known() -> None:
    scheduler = make(max_in_flight_steps=2)
    scheduler.submit(1, prompt(5), 3, NO_STOP)
    first = scheduler.plan()
    second = scheduler.plan()
    assert second.token_ids.tolist() == [-1]
    assert second.positions.tolist() == [5]
    assert second.output_index.tolist() == [1]
    scheduler.commit(first.step, np.array([7], dtype=np.int32))
    third = scheduler.plan()
    assert third.output_index.tolist() == [2]
    scheduler.commit(second.step, np.array([8], dtype=np.int32))
    assert not scheduler.plan(), "its last token is in flight"
    result = scheduler.commit(third.step, np.array([9], dtype=np.int32))
    assert result.finish_reasons.tolist() == [2]
    assert not scheduler.has_work()


def test_a_row_planned_before_a_stop_token_was_known_is_dropped() -> None:
    scheduler = make(max_in_flight_steps=2)
    scheduler.submit(1, prompt(5), 9, np.array([42], dtype=np.int32))
    first, second = scheduler.plan(), scheduler.plan()
    result = scheduler.commit(first.step, np.array([42], dtype=np.int32))
    assert result.finish_reasons.tolist() == [1]
    assert scheduler.abort(1) == AbortStatus.ALREADY_ENDED
    assert scheduler.stats().owned_pages == 1, "the second step still writes the page"
    assert scheduler.commit(second.step, np.array([1], dtype=np.int32)).num_events == 0
    assert scheduler.stats().owned_pages == 0
    assert not scheduler.has_work()


# -- ends -----------------------------------------------------------------------------------------------------------------


def test_stop_wins_over_length_and_waits_for_the_minimum() -> None:
    """Case D1, one token a step: the end of sequence on the last allowed token is a stop; one beyond the limit never comes."""
    for min_new, tokens, reasons in (
        (0, [42], [1]),
        (1, [42, 42], [0, 1]),
        (3, [42, 42, 42], [0, 0, 2]),
        (2, [1, 2, 42], [0, 0, 1]),
    ):
        scheduler = make()
        scheduler.submit(1, prompt(5), 3, np.array([41, 42], dtype=np.int32), min_new)
        got = []
        for token in tokens:
            plan = scheduler.plan()
            got += scheduler.commit(plan.step, np.array([token], dtype=np.int32)).finish_reasons.tolist()
        assert got == reasons
        assert not scheduler.has_work()


def test_abort_before_during_and_after() -> None:
    scheduler = make(max_num_seqs=1)
    device = Device(scheduler)
    for i in (1, 2, 3):
        scheduler.submit(i, prompt(8, seed=i), 4, NO_STOP)
    device.step()
    assert scheduler.abort(2) == AbortStatus.OK  # queued
    assert scheduler.abort(1) == AbortStatus.OK  # decoding, nothing in flight
    assert scheduler.stats().owned_pages == 0
    assert scheduler.abort(1) == AbortStatus.NOT_FOUND
    assert device.finish()[3] == expected_output(prompt(8, seed=3), 4)
    assert scheduler.abort(3) == AbortStatus.NOT_FOUND
    assert scheduler.stats().num_aborted == 2


@pytest.mark.parametrize("depth", [1, 2])
def test_a_thousand_requests_with_aborts_leave_all_pages_free(depth: int) -> None:
    scheduler = make(num_pages=200, page_size=8, max_num_seqs=64, max_num_batched_tokens=256, max_model_len=256)
    device = Device(scheduler, depth)
    rng = np.random.default_rng(5)
    want: dict[int, tuple[np.ndarray, int]] = {}
    aborted = set()
    for i in range(1000):
        ids, max_new = prompt(int(rng.integers(1, 80)), seed=i % 7), int(rng.integers(1, 20))
        if scheduler.submit(i, ids, max_new, NO_STOP) == SubmitStatus.OK:
            want[i] = (ids, max_new)
        if i % 4 == 0:
            device.step()
        if i % 9 == 0:
            victim = int(rng.integers(0, i + 1))
            if scheduler.abort(victim) == AbortStatus.OK:
                aborted.add(victim)
    outputs = device.finish()
    assert aborted
    assert device.most_requests > 16
    for i in want.keys() - aborted:
        assert outputs[i] == expected_output(*want[i])
    for i in aborted:
        assert outputs.get(i, []) == expected_output(*want[i])[: len(outputs.get(i, []))]
    scheduler.flush_cache()
    assert scheduler.stats().free_pages == 200


# -- the Python face ------------------------------------------------------------------------------------------------------


def test_bad_requests_are_values() -> None:
    scheduler = make()
    empty, negative = np.empty(0, dtype=np.int32), np.array([1, -1], dtype=np.int32)
    assert scheduler.submit(1, empty, 4, NO_STOP) == SubmitStatus.EMPTY
    assert scheduler.submit(1, negative, 4, NO_STOP) == SubmitStatus.INVALID_TOKEN
    assert scheduler.submit(1, prompt(4), 0, NO_STOP) == SubmitStatus.INVALID_LENGTH
    assert scheduler.submit(1, prompt(4), 4, NO_STOP, -1) == SubmitStatus.INVALID_LENGTH
    assert scheduler.submit(1, prompt(1024), 1, NO_STOP) == SubmitStatus.TOO_LONG
    assert scheduler.submit(1, prompt(4), 2**62, NO_STOP) == SubmitStatus.TOO_LONG
    assert scheduler.submit(1, prompt(4), 4, NO_STOP) == SubmitStatus.OK
    assert scheduler.submit(1, prompt(4), 4, NO_STOP) == SubmitStatus.DUPLICATE
    assert scheduler.stats().num_submitted == 1


@pytest.mark.parametrize(
    "ids", [[1, 2], np.arange(4), np.arange(4.0), np.zeros((2, 2), np.int32), np.arange(8, dtype=np.int32)[::2]]
)
def test_other_arrays_are_refused(ids: object) -> None:
    with pytest.raises(TypeError):
        make().submit(1, ids, 4, NO_STOP)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, 0) for name in ("num_pages", "page_size", "max_num_seqs", "max_model_len", "max_in_flight_steps")),
        ("max_num_batched_tokens", 7),
        ("chunk_size", -1),
        ("max_step_cost", -1),
        ("context_cost_scale", -1),
        ("context_cost_scale", 2**30),
        ("max_in_flight_steps", 65),
        ("page_size", 2**30),
    ],
)
def test_a_bad_config_names_the_field(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=rf"SchedulerConfig\..*{name}.*expected.*at (least|most)"):
        make(**{name: value})


def test_views_are_read_only_typed_and_guarded() -> None:
    scheduler = make(max_in_flight_steps=2)
    scheduler.submit(1, prompt(5), 30, NO_STOP)
    first = scheduler.plan()
    wide = ["request_ids", "slot_mapping"]
    narrow = ["slots", "query_lens", "cu_query_lens", "seq_lens", "token_ids", "positions", "sample_rows", "output_index"]
    for name in wide + narrow:
        view = getattr(first, name)
        assert view.dtype == (np.int64 if name in wide else np.int32)
        assert not view.flags.writeable
        assert view.base is not None, "a copy"
    assert first.page_updates.shape == (1, 3)
    assert not scheduler.page_table.flags.writeable
    ids = first.token_ids
    second = scheduler.plan()
    assert ids.tolist() == prompt(5).tolist()
    result = scheduler.commit(first.step, np.zeros(1, dtype=np.int32))
    third = scheduler.plan()
    with pytest.raises(RuntimeError, match="step 0 were reused by step 2"):
        _ = first.token_ids
    for plan in (second, third):
        scheduler.commit(plan.step, np.zeros(1, dtype=np.int32))
    with pytest.raises(RuntimeError, match="step 0 were reused by step 2"):
        _ = result.token_ids


def test_views_outlive_their_scheduler() -> None:
    scheduler = make()
    scheduler.submit(1, prompt(5), 3, NO_STOP)
    plan = scheduler.plan()
    views = (plan.token_ids, scheduler.page_table, plan.page_updates)
    result = scheduler.commit(plan.step, np.array([3], dtype=np.int32)).token_ids
    del scheduler, plan
    assert views[0].tolist() == prompt(5).tolist()
    assert views[1][0, 0] == views[2][0, 2]
    assert result.tolist() == [3]


def test_an_empty_plan_says_so() -> None:
    plan = make().plan()
    assert not plan
    assert (plan.step, plan.num_requests, plan.num_tokens) == (-1, 0, 0)
    with pytest.raises(RuntimeError, match="empty plan"):
        _ = plan.token_ids
    with pytest.raises(RuntimeError, match="empty plan"):
        _ = plan.page_updates
