"""Prefill and decode on two control planes, joined by a fake transport whose writes come late, twice, or not at all."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

import numpy as np
import pytest

from tokenspeed_engine.scheduler import (
    AbortStatus,
    EventStatus,
    Plan,
    RequestOptions,
    Role,
    Scheduler,
    SchedulerConfig,
    SubmitStatus,
)

VOCAB_SIZE = 50
NO_STOP = np.empty(0, dtype=np.int32)
PAGE = 4


def prompt(length: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB_SIZE, length).astype(np.int32)


def next_token(content: np.ndarray) -> int:
    return zlib.crc32(content.astype(np.int32).tobytes()) % VOCAB_SIZE


def expected(ids: np.ndarray, count: int) -> list[int]:
    sequence = ids.tolist()
    for _ in range(count):
        sequence.append(next_token(np.array(sequence)))
    return sequence[len(ids) :]


class Engine:
    """A scheduler, and a cache of token ids for keys and values."""

    def __init__(self, num_pages: int, **values: int) -> None:
        sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 256, **values}
        self.scheduler = Scheduler(SchedulerConfig(num_pages=num_pages, page_size=PAGE, **sizes))
        self.cache = np.full(num_pages * PAGE, -1, dtype=np.int64)
        self.outputs: dict[int, list[int]] = {}
        self.remote: list[int] = []

    def submit(self, request_id: int, ids: np.ndarray, max_new: int, role: Role = Role.LOCAL) -> None:
        status = self.scheduler.submit(request_id, ids, max_new, NO_STOP, options=RequestOptions(role=role))
        assert status == SubmitStatus.OK

    def slots(self, pages: np.ndarray, length: int) -> np.ndarray:
        positions = np.arange(length)
        return pages[positions // PAGE].astype(np.int64) * PAGE + positions % PAGE

    def step(self) -> Plan:
        plan = self.scheduler.plan()
        self.remote += plan.remote_prefills[:, 0].tolist()
        self.check()
        if not plan:
            return plan
        self.cache[plan.slot_mapping] = plan.token_ids
        sampled = []
        for row in plan.sample_rows.tolist():
            pages = self.scheduler.page_table[plan.slots[row]]
            sampled.append(next_token(self.cache[self.slots(pages, int(plan.seq_lens[row]))]))
        result = self.scheduler.commit(plan.step, np.array(sampled, dtype=np.int32))
        for request_id, token in zip(result.request_ids.tolist(), result.token_ids.tolist(), strict=True):
            self.outputs.setdefault(request_id, []).append(token)
        self.check()
        return plan

    def run(self) -> None:
        while self.step():
            pass

    def check(self) -> None:
        owners, stats = self.scheduler.debug_owners(), self.scheduler.stats()
        assert (owners.num_owners == 1).all()
        assert (owners.kind == 1).sum() == stats.owned_pages

    @property
    def free(self) -> int:
        stats = self.scheduler.stats()
        return stats.free_pages + stats.evictable_pages


@dataclass
class Write:
    """A write that the transport has promised: it lands where the pages were when it was issued."""

    request_id: int
    slots: np.ndarray
    values: np.ndarray
    first_token: int


@dataclass
class FakeTransport:
    """Copies a prompt from one engine's pages to another's when told to deliver, like a one-sided write."""

    prefill: Engine
    decode: Engine
    writes: list[Write] = field(default_factory=list)

    def connect(self, request_id: int) -> None:
        for engine in (self.prefill, self.decode):
            assert engine.scheduler.bootstrapped(request_id) == EventStatus.OK

    def issue(self, request_id: int, length: int) -> None:
        source = self.prefill.slots(self.prefill.scheduler.pages_of(request_id), length)
        target = self.decode.slots(self.decode.scheduler.pages_of(request_id), length)
        self.writes.append(Write(request_id, target, self.prefill.cache[source].copy(), self.prefill.outputs[request_id][0]))

    def deliver(self) -> tuple[EventStatus, EventStatus]:
        write = self.writes.pop(0)
        self.decode.cache[write.slots] = write.values
        done = self.decode.scheduler.remote_prefill_done(write.request_id, write.first_token)
        if done != EventStatus.NOT_FOUND:
            self.decode.outputs.setdefault(write.request_id, []).append(write.first_token)
        return self.prefill.scheduler.transfer_succeeded(write.request_id), done


def pair(decode_pages: int = 16, **values: int) -> FakeTransport:
    return FakeTransport(Engine(64, **values), Engine(decode_pages, **values))


def start(transport: FakeTransport, request_id: int, ids: np.ndarray, max_new: int) -> None:
    transport.prefill.submit(request_id, ids, max_new, Role.PREFILL)
    transport.decode.submit(request_id, ids, max_new, Role.DECODE)


@pytest.mark.parametrize("length", [3, 4, 17])
def test_the_text_is_that_of_one_engine(length: int) -> None:
    transport = pair(max_num_batched_tokens=8)
    prefill, decode = transport.prefill, transport.decode
    ids = prompt(length, seed=length)
    start(transport, 1, ids, 9)
    assert not prefill.scheduler.plan() and not decode.scheduler.plan()  # the two have not found each other
    transport.connect(1)
    prefill.run()
    decode.run()
    assert decode.remote == [1]
    assert prefill.outputs == {1: expected(ids, 1)}
    transport.issue(1, length)
    assert transport.deliver() == (EventStatus.FINISHED, EventStatus.OK)
    assert not prefill.scheduler.has_work()
    decode.run()
    assert decode.outputs == {1: expected(ids, 9)}
    assert not decode.scheduler.has_work()
    assert (prefill.free, decode.free) == (64, 16)


def test_a_write_after_an_abort_reaches_nobody_elses_pages() -> None:
    """A has pages, is aborted, B comes; then A's write lands. B never has those pages before it, and they return once."""
    transport = pair(decode_pages=5)
    prefill, decode = transport.prefill, transport.decode
    ids_a, ids_b = prompt(8, seed=1), prompt(9, seed=2)
    start(transport, 1, ids_a, 4)
    transport.connect(1)
    prefill.run()
    decode.run()
    pages_a = set(decode.scheduler.pages_of(1).tolist())
    assert len(pages_a) == 2
    transport.issue(1, 8)
    assert decode.scheduler.abort(1) == AbortStatus.OK
    assert decode.scheduler.abort(1) == AbortStatus.ALREADY_ENDED
    assert decode.free == 3
    decode.submit(2, ids_b, 3)  # needs all three that are left
    decode.step()
    assert not pages_a & set(decode.scheduler.pages_of(2).tolist())
    assert transport.deliver()[1] == EventStatus.OK
    assert decode.free + len(decode.scheduler.pages_of(2)) == 5
    assert decode.scheduler.remote_prefill_done(1, 3) == EventStatus.NOT_FOUND  # delivered twice: gone already
    decode.outputs.clear()
    decode.run()
    assert not decode.scheduler.has_work() and decode.free == 5
    decode.submit(3, ids_b, 3)
    decode.run()
    assert decode.outputs[3] == expected(ids_b, 3)


def test_pages_of_an_aborted_request_wait_for_a_failure_too() -> None:
    transport = pair()
    decode = transport.decode
    start(transport, 1, prompt(8, seed=1), 4)
    transport.connect(1)
    decode.run()
    decode.scheduler.abort(1)
    assert decode.free == 14
    assert decode.scheduler.stats().num_outside == 1
    assert decode.scheduler.transfer_failed(1) == EventStatus.FINISHED
    assert decode.free == 16 and not decode.scheduler.has_work()
    assert decode.scheduler.stats().num_failed == 0  # its user ended it before


def test_running_requests_wait_for_no_peer() -> None:
    """A slow peer holds pages; a stream that needs one takes it from another stream, and an only one waits."""
    decode = Engine(6)
    decode.submit(1, prompt(8, seed=1), 4, Role.DECODE)
    decode.scheduler.bootstrapped(1)
    decode.step()
    decode.submit(2, prompt(8, seed=2), 16)  # needs six pages in the end: four are there
    for _ in range(20):
        decode.step()
    assert len(decode.outputs[2]) == 9
    assert decode.scheduler.transfer_failed(1) == EventStatus.FINISHED
    decode.run()
    assert decode.outputs[2] == expected(prompt(8, seed=2), 16)


@pytest.mark.parametrize("stage", ["bootstrapping", "queued", "computing", "handed over"])
@pytest.mark.parametrize("event", ["fail", "abort"])
def test_the_prefill_side_ends_in_every_stage(stage: str, event: str) -> None:
    transport = pair(max_num_batched_tokens=8)
    prefill = transport.prefill
    prefill.submit(1, prompt(20, seed=1), 4, Role.PREFILL)
    stages = ["bootstrapping", "queued", "computing", "handed over"]
    if stages.index(stage) >= 1:
        assert prefill.scheduler.bootstrapped(1) == EventStatus.OK
        assert prefill.scheduler.bootstrapped(1) == EventStatus.UNEXPECTED
    for _ in range({"computing": 1, "handed over": 3}.get(stage, 0)):
        prefill.step()
    is_read = stage == "handed over"
    assert (prefill.scheduler.transfer_succeeded(7), prefill.scheduler.transfer_failed(7)) == (EventStatus.NOT_FOUND,) * 2
    if not is_read:
        assert prefill.scheduler.transfer_succeeded(1) == EventStatus.UNEXPECTED
    if event == "fail":
        assert prefill.scheduler.transfer_failed(1) == EventStatus.FINISHED
        assert prefill.scheduler.stats().num_failed == 1
    else:
        assert prefill.scheduler.abort(1) == AbortStatus.OK
        if is_read:
            assert prefill.scheduler.has_work()  # the other engine still reads
            assert prefill.scheduler.transfer_succeeded(1) == EventStatus.FINISHED
    assert not prefill.scheduler.has_work()
    assert prefill.free == 64


def test_events_of_a_local_request_are_an_error_of_that_request_alone() -> None:
    engine = Engine(16)
    engine.submit(1, prompt(8, seed=1), 6)
    engine.step()
    scheduler = engine.scheduler
    assert scheduler.bootstrapped(1) == EventStatus.UNEXPECTED
    assert scheduler.remote_prefill_done(1, 3) == EventStatus.UNEXPECTED
    assert scheduler.transfer_succeeded(1) == EventStatus.UNEXPECTED
    assert scheduler.transfer_failed(1) == EventStatus.UNEXPECTED
    engine.run()
    assert engine.outputs[1] == expected(prompt(8, seed=1), 6)


def test_a_first_token_that_ends_the_request() -> None:
    decode = Engine(16)
    decode.submit(1, prompt(8, seed=1), 1, Role.DECODE)
    decode.scheduler.bootstrapped(1)
    decode.step()
    assert decode.scheduler.remote_prefill_done(1, -1) == EventStatus.UNEXPECTED
    assert decode.scheduler.remote_prefill_done(1, 5) == EventStatus.FINISHED
    assert not decode.scheduler.has_work() and decode.free == 16


def test_a_cached_prefix_is_not_sent_again() -> None:
    decode = Engine(16)
    ids = prompt(12, seed=1)
    decode.submit(1, ids, 2)
    decode.run()
    decode.submit(2, np.concatenate([ids, prompt(4, seed=2)]), 2, Role.DECODE)
    decode.scheduler.bootstrapped(2)
    plan = decode.scheduler.plan()
    assert plan.remote_prefills.tolist() == [[2, 12]]


def test_a_remote_request_that_gave_way_computes_the_rest_itself() -> None:
    transport = pair(decode_pages=8)
    prefill, decode = transport.prefill, transport.decode
    first, second = prompt(8, seed=1), prompt(8, seed=2)
    decode.submit(1, first, 16)
    decode.step()
    start(transport, 2, second, 12)
    transport.connect(2)
    prefill.run()
    for _ in range(2):
        decode.step()
    transport.issue(2, 8)
    transport.deliver()
    for _ in range(200):
        decode.step()
    assert decode.scheduler.stats().num_retractions > 0
    assert decode.outputs == {1: expected(first, 16), 2: expected(second, 12)}
