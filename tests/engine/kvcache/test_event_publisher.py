"""Events about the cache over real sockets: order, numbers, replay, and what a reader can build from them."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from tokenspeed_engine.kvcache import EventEndpointError, KvEventPublisher, translate_events
from tokenspeed_engine.kvcache.event_publisher import AllBlocksCleared, BlockRemoved, BlockStored, KvEventBatch
from tokenspeed_engine.kvcache.external import page_hashes, root_hash
from tokenspeed_engine.scheduler import Scheduler, SchedulerConfig

PAGE = 4
EVENT = AllBlocksCleared()


class Reader:
    """A router: subscribes, and asks for what it missed."""

    def __init__(self, endpoint: str, replay: str = "", topic: str = "") -> None:
        self.context = zmq.Context()
        self.events = self.context.socket(zmq.SUB)
        self.events.connect(endpoint)
        self.events.setsockopt_string(zmq.SUBSCRIBE, topic)
        self.events.setsockopt(zmq.RCVTIMEO, 10_000)
        self.replay = self.context.socket(zmq.DEALER)
        self.replay.setsockopt(zmq.RCVTIMEO, 10_000)
        if replay:
            self.replay.connect(replay)

    def next(self) -> tuple[int, KvEventBatch]:
        _, number, payload = self.events.recv_multipart()
        return struct.unpack(">q", number)[0], msgspec.msgpack.decode(payload, type=KvEventBatch)

    def again_from(self, number: int) -> list[int]:
        self.replay.send_multipart((b"", struct.pack(">q", number)))
        numbers = []
        while True:
            empty, got, payload = self.replay.recv_multipart()
            assert empty == b""
            if struct.unpack(">q", got)[0] == -1:
                assert payload == b""
                return numbers
            msgspec.msgpack.decode(payload, type=KvEventBatch)
            numbers.append(struct.unpack(">q", got)[0])

    def close(self) -> None:
        self.context.destroy(linger=0)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[KvEventPublisher, Reader]]:
    endpoints = [f"ipc://{tmp_path}/{name}" for name in ("events", "replay")]
    publisher, reader = KvEventPublisher(*endpoints, buffer_batches=5, topic="kv"), Reader(*endpoints, topic="kv")
    _until_heard(publisher, reader)
    yield publisher, reader
    reader.close()
    publisher.close()


def _until_heard(publisher: KvEventPublisher, reader: Reader) -> None:
    """A subscription takes a moment to arrive; what is published before is not heard."""
    for _ in range(200):
        publisher.publish([EVENT])
        if reader.events.poll(50):
            while reader.events.poll(200):
                reader.next()
            return
    raise AssertionError("nothing was heard")


def test_batches_come_in_order_with_numbers_without_gaps(pair: tuple[KvEventPublisher, Reader]) -> None:
    publisher, reader = pair
    for count in range(1, 30):
        publisher.publish([EVENT] * count)
    batches = [reader.next() for _ in range(1, 30)]
    numbers = [number for number, _ in batches]
    assert numbers == list(range(numbers[0], numbers[0] + 29))
    assert [len(batch.events) for _, batch in batches] == list(range(1, 30))


def test_no_events_are_no_message(pair: tuple[KvEventPublisher, Reader]) -> None:
    publisher, reader = pair
    publisher.publish([])
    assert not reader.events.poll(100)


def test_what_is_kept_is_sent_again_and_no_more_than_the_bound(pair: tuple[KvEventPublisher, Reader]) -> None:
    publisher, reader = pair
    for _ in range(8):
        publisher.publish([EVENT])
    last = [reader.next()[0] for _ in range(8)][-1]
    assert reader.again_from(last - 2) == [last - 2, last - 1, last]
    assert reader.again_from(0) == list(range(last - 4, last + 1)), "five batches are kept"
    assert reader.again_from(last + 1) == []


@pytest.mark.parametrize("frames", [(b"",), (b"", b"x"), (b"", b"12345678", b"more")])
def test_a_request_that_is_none_is_answered_with_nothing(pair: tuple[KvEventPublisher, Reader], frames: tuple[bytes, ...]) -> None:
    _, reader = pair
    reader.replay.send_multipart(frames)
    assert reader.replay.recv_multipart()[1] == struct.pack(">q", -1)
    assert reader.again_from(0), "the next one is"


def test_an_endpoint_that_is_taken_names_its_flag(pair: tuple[KvEventPublisher, Reader], tmp_path: Path) -> None:
    (tmp_path / "free").mkdir()
    with pytest.raises(EventEndpointError, match=r"--kv-events-endpoint: ipc:///nowhere/at/all cannot be bound"):
        KvEventPublisher("ipc:///nowhere/at/all")
    with pytest.raises(EventEndpointError, match="--kv-events-replay-endpoint"):
        KvEventPublisher(f"ipc://{tmp_path}/free/events", "ipc:///nowhere/at/all")


def test_the_wire_is_arrays_with_the_names_that_routers_know() -> None:
    batch = KvEventBatch(1.5, (BlockStored((b"h",), None, (1, 2), 2, None, "GPU"), BlockRemoved((b"h",), "CPU"), EVENT))
    plain: Any = msgspec.msgpack.decode(msgspec.msgpack.encode(batch))
    assert plain == [
        1.5,
        [["BlockStored", [b"h"], None, [1, 2], 2, None, "GPU", ""], ["BlockRemoved", [b"h"], "CPU"], ["AllBlocksCleared"]],
    ]


def test_a_reader_knows_what_the_scheduler_holds() -> None:
    """The events of a real scheduler, applied one by one, give each tier's pages."""
    scheduler = Scheduler(
        SchedulerConfig(
            num_pages=8, page_size=PAGE, max_num_seqs=2, max_num_batched_tokens=32, max_model_len=32, num_host_pages=4,
            host_write_through=True, kv_event_pages=1000,
        )
    )  # fmt: skip
    held: dict[str, set[bytes]] = {"GPU": set(), "CPU": set()}
    chains: dict[bytes, tuple[bytes | None, tuple[int, ...]]] = {}
    for number in range(1, 12):
        tokens = np.random.default_rng(number % 4).integers(0, 99, 14).astype(np.int32)
        scheduler.submit(number, tokens, 2, np.empty(0, dtype=np.int32))
        for _ in range(30):
            plan = scheduler.plan()
            ids = np.unique(np.concatenate((plan.write_back_ids, plan.load_back_ids))).astype(np.int64)
            scheduler.complete_transfers(ids, np.ones(len(ids), dtype=bool))
            if plan.num_requests:
                scheduler.commit(plan.step, np.zeros(plan.num_samples, dtype=np.int32))
            for event in translate_events(scheduler.take_kv_events(), PAGE, root_hash):
                if isinstance(event, BlockStored):
                    assert len(event.token_ids) == len(event.block_hashes) * event.block_size
                    before = event.parent_block_hash
                    assert before is None or before in chains, "a parent that no event told of"
                    for index, name in enumerate(event.block_hashes):
                        assert name not in held[event.medium], "stored twice"
                        chains[name] = before, event.token_ids[index * PAGE : (index + 1) * PAGE]
                        held[event.medium].add(name)
                        before = name
                elif isinstance(event, BlockRemoved):
                    held[event.medium] -= set(event.block_hashes)
        stats = scheduler.stats()
        assert len(held["GPU"]) == stats.cached_pages
        assert len(held["CPU"]) == stats.host_cached_pages
    for name in held["GPU"] | held["CPU"]:
        tokens, at = (), name
        while at is not None:
            at, page = chains[at]
            tokens = page + tokens
        assert page_hashes(np.array(tokens, dtype=np.int32), PAGE)[-1] == name
