"""The host tier, with a fake device whose copies take time, end in any order, or fail; a token depends on all of its cache."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from tokenspeed_engine.scheduler import Plan, RequestOptions, Scheduler, SchedulerConfig, SubmitStatus

VOCAB_SIZE = 50
NO_STOP = np.empty(0, dtype=np.int32)
PAGE = 4
GARBAGE = -7


def prompt(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB_SIZE, length).astype(np.int32)


def token_after(content: np.ndarray) -> int:
    return zlib.crc32(content.astype(np.int32).tobytes()) % VOCAB_SIZE


def expected_output(ids: Iterable[int], max_new: int) -> list[int]:
    sequence = list(ids)
    start = len(sequence)
    while len(sequence) < start + max_new:
        sequence.append(token_after(np.array(sequence)))
    return sequence[start:]


class Device:
    """Two caches of token ids. A copy reads its source when it begins and writes its target when it ends: the worst of both."""

    def __init__(self, choices: random.Random, *, fails: float = 0.0, slow: int = 3, **values: Any) -> None:
        sizes = {"num_pages": 16, "max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 128, "num_host_pages": 64}
        self.scheduler = Scheduler(SchedulerConfig(page_size=PAGE, **{**sizes, **values}))
        config = self.scheduler.config
        self.cache = np.full((config.num_pages, PAGE), GARBAGE, dtype=np.int32)
        self.host = np.full((config.num_host_pages, PAGE), GARBAGE, dtype=np.int32)
        self.choices, self.fails, self.slow = choices, fails, slow
        self.copies: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray, int]] = {}
        self.now = 0
        self.outputs: dict[int, list[int]] = {}
        self.cached: dict[int, tuple[int, int]] = {}
        self.log: list[tuple[str, Any]] = []

    def submit(self, request_id: int, ids: np.ndarray, max_new: int, **options: Any) -> None:
        call = (request_id, ids, max_new, NO_STOP, 0, True, RequestOptions(**options))
        self.log.append(("submit", call))
        assert self.scheduler.submit(*call) == SubmitStatus.OK

    def call(self, name: str, *arguments: Any) -> Any:
        self.log.append((name, arguments))
        return getattr(self.scheduler, name)(*arguments)

    def begin(self, plan: Plan) -> None:
        for pairs, ids, source, target in (
            (plan.write_backs, plan.write_back_ids, self.cache, self.host),
            (plan.load_backs, plan.load_back_ids, self.host, self.cache),
        ):
            assert (np.diff(ids) >= 0).all()
            for transfer in np.unique(ids).tolist():
                mine = pairs[ids == transfer]
                assert len(set(mine[:, 1].tolist())) == len(mine)
                if target is self.cache:
                    target[mine[:, 1]] = GARBAGE  # whoever reads before the copy has ended sees this
                done = self.now + self.choices.randint(1, self.slow)
                assert transfer not in self.copies
                self.copies[transfer] = (target, mine[:, 1], source[mine[:, 0]].copy(), done)

    def end(self) -> None:
        """Tell of the copies that are done, in any order."""
        done = [transfer for transfer, copy in self.copies.items() if copy[3] <= self.now]
        self.choices.shuffle(done)
        ok = [self.choices.random() >= self.fails for _ in done]
        for transfer, fine in zip(done, ok, strict=True):
            target, pages, values, _ = self.copies.pop(transfer)
            target[pages] = values if fine else GARBAGE
        if done:
            count = self.call("complete_transfers", np.array(done, dtype=np.int64), np.array(ok))
            assert count == len(done)

    def step(self) -> bool:
        self.now += 1
        self.call("advance_clock", self.now)
        self.end()
        plan = self.call("plan")
        self.begin(plan)
        self.check()
        if not plan:
            return bool(self.copies)
        slots = plan.slot_mapping
        self.cache[slots // PAGE, slots % PAGE] = plan.token_ids
        sampled = []
        for row in plan.sample_rows.tolist():
            positions = np.arange(plan.seq_lens[row])
            pages = self.scheduler.page_table[plan.slots[row]][positions // PAGE]
            sampled.append(token_after(self.cache[pages, positions % PAGE]))
        result = self.call("commit", plan.step, np.array(sampled, dtype=np.int32))
        columns = (result.request_ids, result.token_ids, result.num_cached_tokens, result.num_host_cached_tokens)
        for request_id, token, cached, from_host in zip(*(column.tolist() for column in columns), strict=True):
            self.outputs.setdefault(request_id, []).append(token)
            self.cached[request_id] = (cached, from_host)
        return True

    def check(self) -> None:
        owners, stats = self.scheduler.debug_owners(), self.scheduler.stats()
        assert (owners.num_owners == 1).all()
        levels = (stats.free_pages, stats.owned_pages, stats.cached_pages)
        assert levels == tuple(int((owners.kind == kind).sum()) for kind in (0, 1, 2))
        assert stats.num_transfers == len(self.copies)

    def run(self, limit: int = 5000) -> None:
        for _ in range(limit):
            if not self.step() and not self.scheduler.has_work():
                return
        raise AssertionError("livelock")

    def turn(self, request_id: int, ids: np.ndarray, max_new: int, **options: Any) -> np.ndarray:
        self.submit(request_id, ids, max_new, **options)
        self.run()
        return np.concatenate([ids, np.array(self.outputs[request_id], dtype=np.int32)])


def device(**values: Any) -> Device:
    return Device(random.Random(0), **values)


@pytest.mark.parametrize("write_through", [False, True])
def test_what_the_device_lost_comes_back_from_the_host(write_through: bool) -> None:
    one = device(host_write_through=write_through)
    histories = [one.turn(i, prompt(21, seed=i), 8) for i in range(5)]  # seven full pages each: two of five stay on the device
    turns = [np.concatenate([history, prompt(3, seed=9)]) for history in histories]
    for i, ids in enumerate(turns):
        one.turn(10 + i, ids, 4)
        assert one.outputs[10 + i] == expected_output(ids, 4)
        assert one.cached[10 + i][0] == 28
    assert any(from_host > 0 for _, from_host in one.cached.values())
    stats = one.scheduler.stats()
    assert stats.prefix_host_hit_tokens == sum(from_host for _, from_host in one.cached.values()) > 0
    assert stats.num_loaded_back_pages * PAGE >= stats.prefix_host_hit_tokens
    assert stats.recomputed_tokens == 0


def test_without_a_host_it_is_lost() -> None:
    one = device(num_host_pages=0)
    histories = [one.turn(i, prompt(21, seed=i), 8) for i in range(5)]
    one.turn(10, np.concatenate([histories[0], prompt(3, seed=9)]), 4)
    assert one.cached[10] == (0, 0)


@pytest.mark.parametrize(("load_page_ns", "loads"), [(0, True), (1_000, True), (4_001, False)])
def test_what_is_cheaper_to_compute_is_computed(load_page_ns: int, loads: bool) -> None:
    one = device(load_page_ns=load_page_ns, prefill_token_ns=1_000)
    history = one.turn(1, prompt(21, seed=1), 8)
    for i in range(2, 5):
        one.turn(i, prompt(45, seed=i), 2)
    one.turn(10, np.concatenate([history, prompt(3)]), 4)
    assert (one.cached[10][1] > 0) == loads
    assert one.outputs[10] == expected_output(np.concatenate([history, prompt(3)]), 4)


def test_a_failed_load_is_computed_and_no_text_changes() -> None:
    one = device()
    history = one.turn(1, prompt(21, seed=1), 8)
    for i in range(2, 5):
        one.turn(i, prompt(45, seed=i), 2)
    one.fails = 1.0
    ids = np.concatenate([history, prompt(3)])
    one.turn(10, ids, 4)
    assert one.outputs[10] == expected_output(ids, 4)
    assert one.scheduler.stats().num_failed_transfers > 0


def test_an_abort_while_loading_takes_effect_at_once_and_the_copy_hurts_nobody() -> None:
    one = device(slow=1)
    history = one.turn(1, prompt(21, seed=1), 8)
    for i in range(2, 5):
        one.turn(i, prompt(45, seed=i), 2)
    ids = np.concatenate([history, prompt(3)])
    one.submit(10, ids, 4)
    plan = one.call("plan")
    assert not plan and len(plan.load_backs) > 0
    one.begin(plan)
    assert one.scheduler.stats().num_outside == 1
    one.call("abort", 10)
    assert not one.scheduler.has_work()
    assert one.scheduler.stats().num_transfers >= 1
    one.submit(11, prompt(30, seed=11), 4)
    one.run()
    assert one.outputs[11] == expected_output(prompt(30, seed=11), 4)
    one.turn(12, ids, 4)
    assert one.outputs[12] == expected_output(ids, 4)


def test_two_requests_share_a_load() -> None:
    one = device(slow=4)
    history = one.turn(1, prompt(21, seed=1), 8)
    for i in range(2, 5):
        one.turn(i, prompt(45, seed=i), 2)
    before = one.scheduler.stats().num_loaded_back_pages
    ids = np.concatenate([history, prompt(3)])
    one.submit(10, ids, 4)
    one.submit(11, ids, 4)
    one.run()
    assert one.outputs[10] == one.outputs[11] == expected_output(ids, 4)
    assert one.scheduler.stats().num_loaded_back_pages - before <= 7


def test_a_retracted_request_is_copied_instead_of_computed_again() -> None:
    recomputed = {}
    for num_host_pages in (0, 64):
        one = device(num_pages=10, num_host_pages=num_host_pages, max_num_seqs=2)
        for i in (1, 2):
            one.submit(i, prompt(13, seed=i), 20)  # nine pages each in the end
        one.run()
        assert [one.outputs[i] for i in (1, 2)] == [expected_output(prompt(13, seed=i), 20) for i in (1, 2)]
        assert one.scheduler.stats().num_retractions > 0
        recomputed[num_host_pages] = one.scheduler.stats().recomputed_tokens
    assert recomputed[64] < PAGE < recomputed[0]


def test_a_session_goes_to_the_host_when_its_place_is_wanted() -> None:
    one = device(session_ttl_us=1000)
    history = one.turn(1, prompt(21, seed=1), 8, session=1)
    for i in range(2, 12):
        one.turn(i, prompt(60, seed=i), 2)  # each needs the whole device, and together they flood the host
    assert one.scheduler.stats().num_sessions == 1
    ids = np.concatenate([history, prompt(3)])
    one.turn(20, ids, 4, session=1)
    assert one.cached[20] == (28, 28)
    assert one.outputs[20] == expected_output(ids, 4)


def test_flush_takes_both_tiers_also_what_is_being_copied() -> None:
    one = device(host_write_through=True, slow=50)
    history = one.turn(1, prompt(21, seed=1), 8, session=1)
    one.submit(2, prompt(21, seed=2), 8)
    for _ in range(5):
        one.step()
    one.call("flush_cache")
    one.run()
    one.call("flush_cache")
    assert one.scheduler.stats().host_cached_pages == 0
    assert one.scheduler.stats().free_pages == 16
    one.turn(3, history, 2)
    assert one.cached[3] == (0, 0)


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"num_host_pages": -1}, "num_host_pages: expected at least 0"),
        ({"enable_prefix_cache": False}, "num_host_pages: expected 0 without a prefix cache, got 64"),
        ({"num_host_pages": 0, "host_write_through": True}, "host_write_through: expected a host tier"),
        ({"num_host_pages": 0, "external_store": True}, "external_store: expected a host tier"),
        ({"load_page_ns": -1}, "load_page_ns and prefill_token_ns"),
    ],
)
def test_configurations_that_do_not_fit(values: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        device(**values)


def random_life(seed: int) -> Device:
    """Conversations of a few turns, in and out of sessions and salts, aborts and failures, on pools too small for them."""
    choices = random.Random(seed)
    one = Device(
        choices,
        fails=choices.choice([0.0, 0.0, 0.3]),
        slow=choices.choice([1, 3, 9]),
        num_pages=choices.choice([12, 16, 24]),
        num_host_pages=choices.choice([4, 24, 96]),
        host_write_through=choices.random() < 0.5,
        session_ttl_us=choices.choice([0, 20, 500]),
        max_num_seqs=choices.randint(1, 4),
        max_model_len=48,
    )
    chats = [(prompt(choices.randint(1, 12), seed=chat % 3), chat + 1, choices.choice(["", "", "a"])) for chat in range(5)]
    sent: dict[int, np.ndarray] = {}
    for request_id in range(1, 30):
        chat = choices.randrange(len(chats))
        ids, session, salt = chats[chat]
        max_new = choices.randint(1, 6)
        if len(ids) + max_new > 46:
            chats[chat] = (prompt(5, seed=request_id), session, salt)
            continue
        one.submit(request_id, ids, max_new, session=session * choices.choice([0, 1, 1]), salt=salt)
        sent[request_id] = ids
        for _ in range(choices.randint(0, 8)):
            one.step()
        if choices.random() < 0.15:
            one.call("abort", choices.randint(1, request_id))
        if choices.random() < 0.05:
            one.call("flush_cache")
        if choices.random() < 0.3:
            one.call("end_session", choices.randint(1, 5))
        output = one.outputs.get(request_id, [])
        chats[chat] = (np.concatenate([ids, np.array([*output, choices.randrange(VOCAB_SIZE)], dtype=np.int32)]), session, salt)
    one.run()
    for request_id, output in one.outputs.items():
        assert output == expected_output(sent[request_id], len(output)), f"seed {seed}, request {request_id}"
    assert one.scheduler.stats().owned_pages == 0
    assert (one.scheduler.page_table == -1).all()
    return one


def test_random_lives_keep_every_text() -> None:
    stats = [random_life(seed).scheduler.stats() for seed in range(60)]
    for name in ("prefix_host_hit_tokens", "num_retractions", "num_failed_transfers", "num_aborted", "num_loaded_back_pages"):
        assert sum(getattr(s, name) for s in stats) > 0, name


@pytest.mark.slow
def test_many_random_lives_keep_every_text() -> None:
    for seed in range(1000, 2500):
        random_life(seed)


PLAN_ARRAYS = [
    "request_ids",
    "slots",
    "query_lens",
    "seq_lens",
    "token_ids",
    "slot_mapping",
    "sample_rows",
    "output_index",
    "page_updates",
    "write_backs",
    "write_back_ids",
    "load_backs",
    "load_back_ids",
]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_that_get_one_log_plan_alike(num_ranks: int) -> None:
    """Copies end in another order on each rank; what counts is the order in which rank 0 tells of them.

    The log of a random life is given to all ranks. Before each call the ranks get garbage of different sizes on the heap, so that
    no two have the same addresses.
    """
    num_plans = num_copies = 0
    for seed in range(100, 112):
        one = random_life(seed)
        ranks = []
        keep: list[Any] = []
        for rank in range(num_ranks):
            keep.append([bytearray(random.Random(rank).randint(1, 5000)) for _ in range(50 * rank)])
            ranks.append(Scheduler(one.scheduler.config))
        for name, arguments in one.log:
            answers = []
            for rank, scheduler in enumerate(ranks):
                keep.append(bytearray(17 * rank + 1))
                answers.append(getattr(scheduler, name)(*arguments))
            if name == "plan":
                first = answers[0]
                for other in answers[1:]:
                    assert (first.step, first.num_requests, first.num_decodes) == (
                        other.step,
                        other.num_requests,
                        other.num_decodes,
                    )
                    for array in PLAN_ARRAYS if first else PLAN_ARRAYS[-4:]:
                        assert np.array_equal(getattr(first, array), getattr(other, array)), array
                num_plans += 1
                num_copies += len(first.write_backs) + len(first.load_backs)
        tables = [rank.page_table.tobytes() for rank in ranks]
        assert len(set(tables)) == 1
    assert num_plans > 500 and num_copies > 100
