"""The third tier with a real scheduler, a real pool of the host, real files and a real thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from tokenspeed_engine.kvcache import HostPool, KVLayout
from tokenspeed_engine.kvcache.external import (
    ExternalTier,
    Fetched,
    FileStore,
    PageIdentity,
    StoreWorker,
    page_hashes,
    weights_digest,
)
from tokenspeed_engine.scheduler import Scheduler, SchedulerConfig, SubmitStatus

CPU = torch.device("cpu")
PAGE = 4
LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=8, page_size=PAGE, dtype=torch.float32)
NO_STOP = np.empty(0, dtype=np.int32)


class HeldStore(FileStore):
    """A file store that can be made to hang or to fail."""

    may_go: threading.Event
    fails = False

    def contains_prefix(self, keys: Sequence[bytes]) -> int:
        assert self.may_go.wait(30)
        if self.fails:
            raise OSError("the disk is on fire")
        return super().contains_prefix(keys)


class Engine:
    """A scheduler whose steps write a page's number of tokens into the host's pool, and what stands behind it."""

    def __init__(self, folder: Path, *, num_host_pages: int = 32, timeout_s: float = 30.0) -> None:
        self.scheduler = Scheduler(
            SchedulerConfig(
                num_pages=16,
                page_size=PAGE,
                max_num_seqs=2,
                max_num_batched_tokens=64,
                max_model_len=64,
                num_host_pages=num_host_pages,
                host_write_through=True,
                external_store=True,
            )
        )
        self.host = HostPool(LAYOUT, num_host_pages, CPU)
        self.store = HeldStore(folder, PageIdentity.of("w", LAYOUT), LAYOUT.page_bytes, 2**20)
        self.store.may_go = threading.Event()
        self.store.may_go.set()
        self.worker = StoreWorker(self.store, self.host)
        self.tier = ExternalTier(self.scheduler, self.worker, page_size=PAGE, timeout_s=timeout_s, fence=lambda: lambda: None)
        self.next_id = 1
        self.ready: list[Fetched] = []

    def run(self, tokens: np.ndarray, salt: str = "") -> int:
        """Compute a prompt and two tokens; how many of its tokens came from the host."""
        from tokenspeed_engine.scheduler import RequestOptions

        scheduler, number = self.scheduler, self.next_id
        self.next_id += 1
        status = scheduler.submit(number, tokens, 2, NO_STOP, options=RequestOptions(salt=salt))
        assert status == SubmitStatus.OK
        host_tokens = 0
        for _ in range(40):
            plan = scheduler.plan()
            self.copy(plan, tokens)
            if plan.num_requests:
                events = scheduler.commit(plan.step, np.zeros(plan.num_samples, dtype=np.int32))
                if events.num_events:
                    host_tokens = int(events.num_host_cached_tokens[0])
        assert not scheduler.has_work()
        return host_tokens

    def copy(self, plan: object, tokens: np.ndarray) -> None:
        """Copies are over at once; a page's bytes are those of its hash."""
        ids = np.unique(np.concatenate((plan.write_back_ids, plan.load_back_ids)))  # type: ignore[attr-defined]
        if len(ids):
            self.scheduler.complete_transfers(ids.astype(np.int64), np.ones(len(ids), dtype=bool))

    def fill_saved(self) -> int:
        """Put recognizable bytes into the pages that are offered, and save them."""
        saved = 0
        while True:
            transfer, pages, hashes = self.scheduler.begin_store(64)
            if transfer < 0:
                return saved
            for page, name in zip(pages.tolist(), hashes, strict=True):
                self.host.page(page)[:] = np.resize(name, LAYOUT.page_bytes)
            job = self.worker.save([bytes(row) for row in hashes], pages.tolist())
            assert job is not None
            saved += len(pages)
            deadline = time.monotonic() + 30
            while len(self.store) < saved:
                assert time.monotonic() < deadline
                self.worker.poll()
            self.scheduler.complete_transfers(np.array([transfer]), np.array([True]))

    def poll(self) -> None:
        ready, ended = self.tier.poll()
        self.ready += ready
        if ended:
            self.scheduler.complete_transfers(np.array(ended, dtype=np.int64), np.ones(len(ended), dtype=bool))

    def wait(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < deadline
            self.poll()
            time.sleep(0.001)

    def fetch(self, name: str, tokens: np.ndarray, salt: str = "") -> int:
        """Tokens that the store gave."""
        if not self.tier.begin(name, tokens, salt):
            return 0
        self.wait(lambda: any(one.name == name for one in self.ready))
        return self.ready[-1].num_tokens


def prompt(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1000, length).astype(np.int32)


@pytest.fixture
def engine(tmp_path: Path):
    made = Engine(tmp_path)
    yield made
    made.store.may_go.set()
    assert made.tier.close()


@pytest.fixture
def filled(tmp_path: Path):
    """The folder after an engine that computed one prompt of five pages and a tail."""
    first = Engine(tmp_path)
    first.run(prompt(22))
    assert first.fill_saved() == 5
    assert first.tier.close()
    return tmp_path


@pytest.mark.parametrize("salt", ["", "tenant"])
def test_hashes_are_those_of_the_scheduler(engine: Engine, salt: str) -> None:
    tokens = prompt(23)
    first, hashes = engine.scheduler.missing_hashes(tokens, salt)
    assert first == 0
    assert [bytes(row) for row in hashes] == page_hashes(tokens, PAGE, salt)
    assert page_hashes(tokens, PAGE, "another") != page_hashes(tokens, PAGE, salt)
    assert page_hashes(tokens[:20], PAGE, salt) == page_hashes(tokens, PAGE, salt)


def test_a_new_engine_finds_what_an_earlier_one_saved(filled: Path) -> None:
    engine = Engine(filled)
    tokens = prompt(22)
    assert engine.fetch("a", tokens) == 20
    assert engine.tier.num_fetched_pages == 5
    cached = {bytes(row) for row in engine.scheduler.missing_hashes(tokens, "")[1]}
    assert not cached, "the host has all of its whole pages"
    assert engine.run(tokens) == 20
    # The bytes are those that were saved, page by page.
    held = {engine.host.page(page).tobytes() for page in range(engine.host.num_pages)}
    assert all(
        np.resize(np.frombuffer(name, dtype=np.uint8), LAYOUT.page_bytes).tobytes() in held for name in page_hashes(tokens, PAGE)
    )
    assert engine.fill_saved() == 0, "what came from the store is not offered to it again"
    assert engine.tier.close()


def test_one_token_is_left_to_compute(filled: Path) -> None:
    engine = Engine(filled)
    assert engine.fetch("a", prompt(22)[:20]) == 16
    assert engine.tier.close()


def test_another_prompt_or_tenant_finds_nothing(filled: Path) -> None:
    engine = Engine(filled)
    assert engine.fetch("a", prompt(22), salt="tenant") == 0
    assert engine.fetch("b", prompt(22, seed=1)) == 0
    mixed = prompt(22)
    mixed[9] += 1
    assert engine.fetch("c", mixed) == 8
    assert engine.tier.close()


def test_a_damaged_page_ends_what_is_fetched(filled: Path) -> None:
    engine = Engine(filled)
    number, slot, _ = engine.store._slots[page_hashes(prompt(22), PAGE)[2]]
    engine.store._segments[number].page(slot)[5] ^= 1
    assert engine.fetch("a", prompt(22)) == 8
    assert engine.tier.num_corrupted == 1
    assert engine.run(prompt(22)) == 8
    assert engine.tier.close()


def test_a_store_that_hangs_costs_a_bounded_wait_and_only_once(filled: Path) -> None:
    engine = Engine(filled, timeout_s=0.05)
    engine.store.may_go.clear()
    assert engine.fetch("a", prompt(22)) == 0
    assert engine.tier.num_timeouts == 1
    assert not engine.tier.begin("b", prompt(22), ""), "nobody waits for a store that owes an answer"
    engine.store.may_go.set()
    engine.wait(lambda: not engine.tier.has_pending)
    assert [one.name for one in engine.ready] == ["a"]
    assert engine.fetch("c", prompt(22)) == 20, "it is asked again once it has answered"
    assert engine.tier.close()


def test_a_store_that_fails_costs_a_hit(filled: Path) -> None:
    engine = Engine(filled)
    engine.store.fails = True
    assert engine.fetch("a", prompt(22)) == 0
    assert engine.worker.num_errors == 1
    assert engine.run(prompt(22)) == 0
    assert engine.tier.close()


def test_a_request_that_is_gone_is_not_named(filled: Path) -> None:
    engine = Engine(filled)
    engine.store.may_go.clear()
    assert engine.tier.begin("a", prompt(22), "")
    engine.tier.cancel("a")
    engine.store.may_go.set()
    engine.wait(lambda: not engine.tier.has_pending)
    assert not engine.ready
    assert engine.run(prompt(22)) == 0
    assert engine.tier.close()


def test_a_small_pool_of_the_host_takes_what_it_has_room_for(filled: Path) -> None:
    engine = Engine(filled, num_host_pages=3)
    assert engine.fetch("a", prompt(22)) == 12
    assert engine.run(prompt(22)) == 12
    assert engine.tier.close()


def test_pages_are_saved_by_themselves(engine: Engine) -> None:
    engine.run(prompt(22))
    engine.tier.save()
    engine.wait(lambda: not engine.tier.has_pending)
    assert engine.tier.num_saved_pages == 5
    assert len(engine.store) == 5


def test_tickets_are_used_once_and_only_whole(engine: Engine) -> None:
    scheduler, tokens = engine.scheduler, prompt(22)
    ticket, pages = scheduler.reserve_host_pages(4)
    assert len(set(pages.tolist())) == 4
    with pytest.raises(ValueError, match="expected whole pages of tokens"):
        scheduler.insert_host_pages(ticket, tokens[:21], 0)
    with pytest.raises(ValueError, match="expected whole pages of tokens"):
        scheduler.insert_host_pages(ticket, tokens[:20], 0)
    assert scheduler.insert_host_pages(ticket, tokens[:12], 0) == 3
    for use in (lambda: scheduler.insert_host_pages(ticket, tokens[:4], 0), lambda: scheduler.release_host_pages(ticket)):
        with pytest.raises(ValueError, match="expected a ticket"):
            use()
    assert scheduler.stats().host_cached_pages == 3
    other, rest = scheduler.reserve_host_pages(1000)
    assert len(rest) == 32, "what is only cached makes room, and the fourth page of the ticket went back"
    scheduler.release_host_pages(other)
    assert scheduler.insert_host_pages(scheduler.reserve_host_pages(1)[0], tokens[:0], 0) == 0


def test_the_queue_is_bounded(engine: Engine) -> None:
    engine.store.may_go.clear()
    worker = StoreWorker(engine.store, engine.host, max_queued=3)
    jobs = [worker.lookup([b"k" * 32]) for _ in range(8)]
    assert 3 <= sum(job is not None for job in jobs) <= 4, "one runs, three wait"
    engine.store.may_go.set()
    deadline = time.monotonic() + 30
    results = []
    while len(results) < sum(job is not None for job in jobs):
        assert time.monotonic() < deadline
        results += worker.poll()
    assert [one.job for one in results] == [job for job in jobs if job is not None]
    # The store is the fixture's: it is closed with it.
    worker._store = None  # type: ignore[assignment]
    worker.close()


def test_the_digest_of_weights_sees_every_part(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(bytes(5_000_000))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("not weights")
    before = weights_digest(tmp_path)
    (tmp_path / "notes.txt").write_text("still not")
    assert weights_digest(tmp_path) == before
    (tmp_path / "config.json").write_text("{ }")
    assert weights_digest(tmp_path) != before
    (tmp_path / "config.json").write_text("{}")
    for where in (0, 2_500_000, 4_980_000):  # a tensor that changed, not a byte: the file is too large to be read whole
        content = bytearray(5_000_000)
        content[where : where + 20_000] = bytes([1]) * 20_000
        (tmp_path / "a.safetensors").write_bytes(content)
        assert weights_digest(tmp_path) != before, where
    assert weights_digest(tmp_path / "config.json") != weights_digest(tmp_path)
