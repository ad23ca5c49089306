"""Tells routers over ZMQ which pages the cache gained and lost."""

from __future__ import annotations

import logging
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
import zmq

logger = logging.getLogger(__name__)

_SEQUENCE = struct.Struct(">q")
_END_OF_REPLAY = _SEQUENCE.pack(-1)
_HIGH_WATER_MARK = 100_000  # messages that a slow subscriber may lag behind before it loses some, and must ask for them
_POLL_MS = 200


class BlockStored(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """A tier has these pages now.

    Attributes:
        block_hashes: one of each page, in the order of the sequence.
        parent_block_hash: of the page before the first; None at the start of a sequence.
        token_ids: of all these pages.
        block_size: tokens in a page.
        lora_id: always None: there are no adapters.
        medium: GPU for the device's pool (a CPU's too), CPU for the host's, as the field names tiers.
        cache_salt: of the tenant; empty for none.
    """

    block_hashes: tuple[bytes, ...]
    parent_block_hash: bytes | None
    token_ids: tuple[int, ...]
    block_size: int
    lora_id: int | None
    medium: str
    cache_salt: str = ""


class BlockRemoved(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """A tier has these pages no more."""

    block_hashes: tuple[bytes, ...]
    medium: str


class AllBlocksCleared(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """No tier has anything; what follows starts anew."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KvEventBatch(msgspec.Struct, array_like=True, frozen=True):
    """What one message tells.

    Attributes:
        ts: seconds since the epoch.
        events: in the order in which they happened.
    """

    ts: float
    events: tuple[KvEvent, ...]


class EventEndpointError(ValueError):
    """An endpoint cannot be bound; the message says which and why."""


class KvEventPublisher:
    """Publishes batches on a PUB socket, and sends those again that a subscriber missed.

    A message has three frames: topic, sequence number (8 bytes, big-endian, from 0), msgpack of a KvEventBatch. To the replay
    socket (ROUTER) a subscriber sends a sequence number as one frame behind an empty one, as a DEALER or REQ socket does; it gets
    an empty frame, a number and a batch for each that is kept from there on, and at last the number -1 with an empty batch.

    Sockets live on a thread of their own, so that the loop never waits for a subscriber.

    Args:
        endpoint: of the PUB socket.
        replay_endpoint: of the ROUTER socket; empty for none.
        buffer_batches: batches that are kept for replay.
        topic: first frame of each message.
    Raises:
        EventEndpointError: an endpoint cannot be bound.
    """

    def __init__(self, endpoint: str, replay_endpoint: str = "", *, buffer_batches: int = 10_000, topic: str = "") -> None:
        self._topic = topic.encode()
        self._encoder = msgspec.msgpack.Encoder()
        self._next = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=buffer_batches)
        self._queue: deque[tuple[bytes, bytes]] = deque()
        try:
            self._publish = self._bound(zmq.PUB, endpoint, "--kv-events-endpoint")
            self._replay = self._bound(zmq.ROUTER, replay_endpoint, "--kv-events-replay-endpoint") if replay_endpoint else None
        except EventEndpointError:
            self._context.destroy(linger=0)
            raise
        # The thread sleeps in a poll; a byte on this pair wakes it.
        self._wake, self._woken = self._context.socket(zmq.PAIR), self._context.socket(zmq.PAIR)
        self._woken.bind("inproc://kv-events")
        self._wake.connect("inproc://kv-events")
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def publish(self, events: Sequence[KvEvent]) -> None:
        """Send a batch; nothing for no events. Returns at once."""
        if not events:
            return
        self._queue.append((_SEQUENCE.pack(self._next), self._encoder.encode(KvEventBatch(time.time(), tuple(events)))))
        self._next += 1
        self._wake.send(b"")

    def close(self) -> None:
        """Send what waits, and unbind."""
        self._is_closing = True
        self._wake.send(b"")
        self._thread.join(5)
        self._context.destroy(linger=100)

    def _bound(self, kind: int, endpoint: str, flag: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set_hwm(_HIGH_WATER_MARK)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise EventEndpointError(f"{flag}: {endpoint} cannot be bound: {error}. Fix: choose another address or port") from error
        return socket

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._woken, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        while True:
            ready = dict(poller.poll(_POLL_MS))
            if self._woken in ready:
                self._woken.recv()
            while self._queue:
                message = self._queue.popleft()
                self._kept.append(message)
                self._publish.send_multipart((self._topic, *message))
            if self._replay is not None and self._replay in ready:
                self._answer(self._replay)
            if self._is_closing and not self._queue:
                return

    def _answer(self, replay: zmq.Socket[bytes]) -> None:
        frames = replay.recv_multipart()
        who, wanted = frames[0], frames[-1]
        if len(frames) != 3 or len(wanted) != _SEQUENCE.size:
            logger.warning("kv events: a replay request of %d frames, expected identity, empty frame, 8 bytes", len(frames))
        else:
            (start,) = _SEQUENCE.unpack(wanted)
            for sequence, payload in list(self._kept):
                if _SEQUENCE.unpack(sequence)[0] >= start:
                    self._send(replay, who, sequence, payload)
        self._send(replay, who, _END_OF_REPLAY, b"")

    @staticmethod
    def _send(replay: zmq.Socket[bytes], who: bytes, sequence: bytes, payload: bytes) -> None:
        # Who asks and does not read loses the rest, and sees it by the numbers.
        try:
            replay.send_multipart((who, b"", sequence, payload), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            logger.warning("kv events: replay to a subscriber failed: %s", error)


_STORED, _REMOVED, _CLEARED = range(3)
_MEDIUM = ("GPU", "CPU")


def translate_events(raw: Iterable[tuple[Any, ...]], page_size: int, root_of: Callable[[int, str], bytes]) -> list[KvEvent]:
    """The scheduler's events as those that are published.

    Args:
        raw: tuples (kind, tier, salt, hashes [n, 32] uint8, parent, token ids), see `Scheduler.take_kv_events`.
        page_size: tokens in a page.
        root_of: hash that stands before the first page of a salt, see `root_hash`.
    """
    events: list[KvEvent] = []
    for kind, tier, salt, hashes, parent, tokens in raw:
        names = tuple(bytes(row) for row in hashes)
        if kind == _STORED:
            before = None if parent == root_of(page_size, salt) else parent
            events.append(BlockStored(names, before, tuple(tokens.tolist()), page_size, None, _MEDIUM[tier], salt))
        elif kind == _REMOVED:
            events.append(BlockRemoved(names, _MEDIUM[tier]))
        else:
            events.append(AllBlocksCleared())
    return events
