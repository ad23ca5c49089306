"""Conversations between two turns: kept for a time, given up for what runs, taken over by the next turn."""

from __future__ import annotations

import zlib

import numpy as np
import pytest

from tokenspeed_engine.scheduler import RequestOptions, Scheduler, SchedulerConfig

VOCAB_SIZE = 50
NO_STOP = np.empty(0, dtype=np.int32)
PAGE = 4
TTL_US = 1000


def prompt(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB_SIZE, length).astype(np.int32)


class Runner:
    """Runs a scheduler to the end of what it has; a token is a checksum of its position and request."""

    def __init__(self, num_pages: int = 16, ttl_us: int = TTL_US, **values: int) -> None:
        sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 256, **values}
        self.scheduler = Scheduler(SchedulerConfig(num_pages=num_pages, page_size=PAGE, session_ttl_us=ttl_us, **sizes))
        self.cached: dict[int, int] = {}
        self.outputs: dict[int, list[int]] = {}

    def turn(self, request_id: int, ids: np.ndarray, max_new: int, session: int = 0, salt: str = "") -> np.ndarray:
        options = RequestOptions(session=session, salt=salt)
        self.scheduler.submit(request_id, ids, max_new, NO_STOP, options=options)
        self.run()
        return np.concatenate([ids, np.array(self.outputs[request_id], dtype=np.int32)])

    def run(self) -> None:
        while plan := self.scheduler.plan():
            tokens = [
                zlib.crc32(f"{request} {index}".encode()) % VOCAB_SIZE
                for request, index in zip(plan.request_ids[plan.sample_rows], plan.output_index, strict=True)
            ]
            result = self.scheduler.commit(plan.step, np.array(tokens, dtype=np.int32))
            self.cached.update(zip(result.request_ids.tolist(), result.num_cached_tokens.tolist(), strict=True))
            for request_id, token in zip(result.request_ids.tolist(), result.token_ids.tolist(), strict=True):
                self.outputs.setdefault(request_id, []).append(token)
            assert (self.scheduler.debug_owners().num_owners == 1).all()

    @property
    def num_sessions(self) -> int:
        return self.scheduler.stats().num_sessions


def test_others_do_not_push_a_session_out_of_the_cache() -> None:
    for ttl_us, kept in ((TTL_US, True), (0, False)):
        runner = Runner(ttl_us=ttl_us)
        history = runner.turn(1, prompt(20, seed=1), 5, session=7)  # six pages are full in the end
        for i in range(2, 8):
            runner.turn(i, prompt(30, seed=i), 2)  # eight pages each: more than the sixteen, one after the other
        runner.turn(9, np.concatenate([history, prompt(3, seed=9)]), 2, session=7)
        assert (runner.cached[9] == 24) == kept
        assert runner.num_sessions == (1 if kept else 0)


def test_it_ends_with_its_time_and_with_its_client() -> None:
    runner = Runner()
    runner.scheduler.advance_clock(100)
    for session in (1, 2):
        runner.turn(session, prompt(8, seed=session), 2, session=session)
    assert runner.num_sessions == 2
    assert runner.scheduler.stats().evictable_pages == 0
    assert runner.scheduler.end_session(2) is True
    assert runner.scheduler.end_session(2) is False
    runner.scheduler.advance_clock(100 + TTL_US - 1)
    assert runner.num_sessions == 1
    runner.scheduler.advance_clock(100 + TTL_US)
    assert runner.num_sessions == 0
    assert runner.scheduler.stats().evictable_pages == runner.scheduler.stats().cached_pages > 0
    assert not runner.scheduler.has_work()


def test_each_turn_renews_it() -> None:
    runner = Runner()
    history = runner.turn(1, prompt(8), 2, session=1)
    runner.scheduler.advance_clock(900)
    runner.turn(2, np.concatenate([history, prompt(3)]), 2, session=1)
    runner.scheduler.advance_clock(1500)
    assert runner.num_sessions == 1
    runner.scheduler.advance_clock(1900)
    assert runner.num_sessions == 0


def test_sessions_keep_half_of_the_pool_at_most() -> None:
    runner = Runner(num_pages=16)
    for session in range(1, 5):
        runner.turn(session, prompt(14, seed=session), 3, session=session)  # four pages each
    assert runner.num_sessions == 2
    assert [runner.scheduler.end_session(session) for session in range(1, 5)] == [False, False, True, True]


def test_one_request_alone_gets_the_whole_pool() -> None:
    runner = Runner(num_pages=16)
    for session in (1, 2):
        runner.turn(session, prompt(14, seed=session), 3, session=session)
    runner.turn(10, prompt(60, seed=10), 4)
    assert len(runner.outputs[10]) == 4
    assert runner.num_sessions == 0


def test_the_queue_waits_for_what_runs_before_it_takes_from_sessions() -> None:
    runner = Runner(num_pages=16)
    for session in (1, 2):
        runner.turn(session, prompt(14, seed=session), 3, session=session)
    for request_id in (3, 4, 5):
        runner.scheduler.submit(request_id, prompt(20, seed=request_id), 4, NO_STOP)  # six pages: one of them fits beside
    runner.run()
    assert [len(runner.outputs[i]) for i in (3, 4, 5)] == [4, 4, 4]
    assert runner.num_sessions == 2


def test_a_stream_that_grows_takes_from_sessions_before_it_stops_another() -> None:
    runner = Runner(num_pages=12)
    runner.turn(1, prompt(18, seed=1), 3, session=1)  # five pages
    runner.scheduler.submit(3, prompt(4, seed=3), 20, NO_STOP)
    runner.scheduler.submit(4, prompt(4, seed=4), 20, NO_STOP)
    runner.run()
    assert [len(runner.outputs[i]) for i in (3, 4)] == [20, 20]
    assert runner.scheduler.stats().num_retractions == 0
    assert runner.num_sessions == 0


def test_an_aborted_turn_keeps_what_the_turn_before_left() -> None:
    runner = Runner()
    history = runner.turn(1, prompt(8), 2, session=1)
    runner.scheduler.submit(2, np.concatenate([history, prompt(9)]), 5, NO_STOP, options=RequestOptions(session=1))
    runner.scheduler.abort(2)  # in the queue
    assert runner.num_sessions == 1
    runner.turn(3, np.concatenate([history, prompt(9)]), 2, session=1)
    assert runner.cached[3] == 8


def test_flush_takes_sessions_too() -> None:
    runner = Runner()
    runner.turn(1, prompt(8), 2, session=1)
    assert runner.scheduler.flush_cache() == 2
    assert runner.num_sessions == 0
    assert runner.scheduler.stats().free_pages == 16


def test_a_negative_time_to_live_is_refused() -> None:
    with pytest.raises(ValueError, match=r"session_ttl_us: expected at least 0, got -1"):
        Runner(ttl_us=-1)


def test_pause_plans_nothing_and_loses_nothing() -> None:
    runner = Runner()
    runner.scheduler.submit(1, prompt(8), 4, NO_STOP)
    plan = runner.scheduler.plan()
    runner.scheduler.pause()
    assert not runner.scheduler.plan()
    assert runner.scheduler.commit(plan.step, np.array([3], dtype=np.int32)).num_events == 1
    runner.scheduler.submit(2, prompt(8, seed=2), 2, NO_STOP)
    runner.scheduler.submit(3, prompt(8, seed=2), 2, NO_STOP)
    runner.scheduler.abort(3)
    assert not runner.scheduler.plan()
    runner.scheduler.resume()
    runner.run()
    assert [len(runner.outputs[i]) for i in (1, 2)] == [3, 2]


def test_salts_share_nothing_and_each_finds_its_own() -> None:
    runner = Runner(num_pages=32)
    ids = prompt(20)
    for request_id, salt, cached in ((1, "", 0), (2, "a", 0), (3, "b", 0), (4, "a", 16), (5, "", 16), (6, "b", 16), (7, "c", 0)):
        runner.turn(request_id, ids, 2, salt=salt)
        assert runner.cached[request_id] == cached, salt


def test_a_salt_keeps_its_session_apart() -> None:
    runner = Runner(num_pages=32)
    history = runner.turn(1, prompt(20), 5, session=1, salt="a")
    runner.turn(2, np.concatenate([history, prompt(3)]), 2, session=2, salt="b")
    assert runner.cached[2] == 0
    assert runner.num_sessions == 2


def test_pages_of_a_session_that_ended_are_the_first_to_go() -> None:
    for ends in (True, False):
        runner = Runner()
        older = prompt(20, seed=1)
        runner.turn(1, older, 1)
        runner.turn(2, prompt(20, seed=2), 1, session=7)
        if ends:
            assert runner.scheduler.end_session(7)
        runner.turn(3, prompt(40, seed=3), 1)  # more than what is free
        runner.turn(4, older, 1)
        assert (runner.cached[4] == 16) == ends  # all but the page whose last token is always computed
