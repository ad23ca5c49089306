"""Both ends of the link over a real socket: handshake, order, bounds."""

from __future__ import annotations

import asyncio
import os
import stat
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from tokenspeed_engine.ipc import (
    PROTOCOL_VERSION,
    AbortRequests,
    CoreFailed,
    CoreLink,
    FrontendLink,
    HandshakeError,
    LinkBusyError,
    LinkDownError,
    LoadProgress,
    MessageTooLargeError,
    PrivateDirectory,
    ProtocolError,
    QueryStats,
    SocketPathError,
    SubmitRequest,
)
from tokenspeed_engine.types import SamplingParams, TokenizedRequest

LIMIT = 65536


class Pair:
    """A front end's link in the test's loop; cores connect from a worker thread, as they block."""

    def __init__(self, path: Path, queue_limit: int = 16) -> None:
        self.directory = PrivateDirectory(str(path))
        self.received: list[Any] = []
        self.link = FrontendLink(self.directory.endpoint, self.received.append, max_message_bytes=LIMIT, queue_limit=queue_limit)
        self.link.start()
        self.pool = ThreadPoolExecutor(1)
        self.cores: list[CoreLink] = []

    async def core(self, function: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self.pool, lambda: function(*args))

    async def connect(self, **options: Any) -> CoreLink:
        settings = {"token": "", "role": "data", "max_message_bytes": LIMIT, "timeout_s": 10.0} | options
        link: CoreLink = await self.core(lambda: CoreLink(self.directory.endpoint, **settings))
        self.cores.append(link)
        return link

    async def until(self, condition: Callable[[], bool]) -> None:
        for _ in range(1000):
            if condition():
                return
            await asyncio.sleep(0.005)
        raise AssertionError(f"not reached; received {self.received[:3]}")

    async def close(self) -> None:
        for core in self.cores:
            await self.core(core.close)
        self.pool.shutdown()
        self.link.close()
        self.directory.close()


@pytest.fixture
async def pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    pair = Pair(Path("/tmp"))
    yield pair
    await pair.close()


def try_send(link: FrontendLink, expected: type[Exception]) -> bool:
    """Send something; False for the expected error."""
    try:
        link.send(AbortRequests(("x" * 1000,)))
    except expected:
        return False
    return True


async def test_messages_go_both_ways_in_order(pair: Pair) -> None:
    core = await pair.connect(token=pair.link.new_token())
    assert pair.link.is_connected
    for number in range(300):
        while True:
            try:
                pair.link.send(QueryStats(number))
                break
            except LinkBusyError:
                await asyncio.sleep(0.001)
        assert await pair.core(core.send, LoadProgress("s", number)) is True
    got: list[Any] = []
    while len(got) < 300:
        got += await pair.core(core.receive, 5.0)
    assert [message.query_id for message in got] == list(range(300))
    await pair.until(lambda: len(pair.received) == 300)
    assert [message.done for message in pair.received] == list(range(300))


async def test_another_protocol_version_is_refused_with_both_versions(pair: Pair) -> None:
    token = pair.link.new_token()
    with pytest.raises(HandshakeError, match=f"expected {PROTOCOL_VERSION}, got {PROTOCOL_VERSION + 1}"):
        await pair.connect(token=token, protocol_version=PROTOCOL_VERSION + 1)
    assert not pair.link.is_connected
    assert pair.link.num_refused == 1
    await pair.connect(token=token)
    assert pair.link.is_connected


@pytest.mark.parametrize("token", ["", "0" * 64, "\u00e9"])
async def test_a_wrong_token_is_refused(pair: Pair, token: str) -> None:
    pair.link.new_token()
    with pytest.raises(HandshakeError, match="token"):
        await pair.connect(token=token)


async def test_no_token_is_accepted_before_a_core_is_expected(pair: Pair) -> None:
    with pytest.raises(HandshakeError, match="token"):
        await pair.connect(token="")


async def test_a_role_can_be_taken_once(pair: Pair) -> None:
    token = pair.link.new_token()
    await pair.connect(token=token)
    with pytest.raises(HandshakeError, match="taken"):
        await pair.connect(token=token)
    await pair.connect(token=token, role="heartbeat")
    with pytest.raises(HandshakeError, match="role"):
        await pair.connect(token=token, role="admin")


async def test_a_core_that_was_replaced_is_not_heard(pair: Pair) -> None:
    old = await pair.connect(token=pair.link.new_token())
    new_token = pair.link.new_token()
    await pair.core(old.send, LoadProgress("old"))
    new = await pair.connect(token=new_token)
    await pair.core(new.send, LoadProgress("new"))
    await pair.until(lambda: bool(pair.received))
    assert [message.stage for message in pair.received] == ["new"]


async def test_an_oversized_message_is_refused_by_the_sender(pair: Pair) -> None:
    core = await pair.connect(token=pair.link.new_token())
    with pytest.raises(MessageTooLargeError):
        pair.link.send(SubmitRequest(TokenizedRequest("r", (70000,) * LIMIT, SamplingParams())))
    with pytest.raises(MessageTooLargeError):
        await pair.core(core.send, CoreFailed("x" * (LIMIT + 1)))
    pair.link.send(QueryStats(1))
    assert await pair.core(core.receive, 5.0) == [QueryStats(1)]


async def test_a_stranger_cannot_disturb(pair: Pair) -> None:
    core = await pair.connect(token=pair.link.new_token())

    def disturb() -> None:
        socket = zmq.Context.instance().socket(zmq.DEALER)
        socket.connect(pair.directory.endpoint)
        socket.send(b"\x00garbage")
        socket.send(msgspec.msgpack.encode({"type": "failed", "message": "forged"}))
        socket.send_multipart([b"a", b"b", b"c"])
        socket.send(b"x" * (LIMIT * 2))
        time.sleep(0.05)
        socket.close(linger=0)

    await pair.core(disturb)
    await pair.until(lambda: pair.link.num_refused >= 3)
    await pair.core(core.send, LoadProgress("real"))
    await pair.until(lambda: bool(pair.received))
    assert pair.received == [LoadProgress("real")]


async def test_a_bad_message_of_the_core_is_dropped(pair: Pair) -> None:
    core = await pair.connect(token=pair.link.new_token())
    await pair.core(core._socket.send, b"\xc1")
    await pair.core(core.send, LoadProgress("after"))
    await pair.until(lambda: bool(pair.received))
    assert pair.received == [LoadProgress("after")]


async def test_a_handler_that_fails_does_not_stop_the_link(pair: Pair) -> None:
    core = await pair.connect(token=pair.link.new_token())
    take, pair.link._handler = pair.link._handler, lambda message: 1 / 0
    await pair.core(core.send, LoadProgress("lost"))
    await pair.core(core.send, LoadProgress("lost, too"))
    await asyncio.sleep(0.1)
    pair.link._handler = take
    await pair.core(core.send, LoadProgress("after"))
    await pair.until(lambda: bool(pair.received))
    assert pair.received == [LoadProgress("after")]


async def test_a_bad_message_to_the_core_is_an_error_in_its_place(pair: Pair) -> None:
    core = await pair.connect(token=pair.link.new_token())
    assert pair.link._data_peer is not None
    pair.link._send_raw(pair.link._data_peer, b"\xc1")
    pair.link.send(QueryStats(1))
    got: list[Any] = []
    while len(got) < 2:
        got += await pair.core(core.receive, 5.0)
    assert isinstance(got[0], ProtocolError)
    assert got[1] == QueryStats(1)


async def test_a_full_queue_is_an_error_and_not_a_wait(tmp_path: Path) -> None:
    pair = Pair(Path("/tmp"), queue_limit=4)
    try:
        core = await pair.connect(token=pair.link.new_token(), queue_limit=4)
        sent = 0
        while try_send(pair.link, LinkBusyError):
            sent += 1
            assert sent < 100_000
        got: list[Any] = []
        while len(got) < sent:
            got += await pair.core(core.receive, 5.0)
        assert len(got) == sent
    finally:
        await pair.close()


async def test_a_slow_front_end_makes_send_return_false(pair: Pair) -> None:
    core = await pair.connect(token=pair.link.new_token())
    message = LoadProgress("x" * 60000)
    # The event loop of the front end stands still meanwhile.
    results = pair.pool.submit(lambda: [core.send(message) for _ in range(5000)]).result(timeout=60)
    assert results[0] is True
    assert not all(results)


async def test_sending_to_nobody_says_so(pair: Pair) -> None:
    with pytest.raises(LinkDownError):
        pair.link.send(QueryStats(0))
    core = await pair.connect(token=pair.link.new_token())
    await pair.core(core.close)
    pair.cores.clear()
    await pair.until(lambda: not try_send(pair.link, LinkDownError))


def test_a_silent_front_end_is_a_handshake_error() -> None:
    directory = PrivateDirectory("/tmp")
    try:
        with pytest.raises(HandshakeError, match="got none"):
            CoreLink(directory.endpoint, token="t", role="data", max_message_bytes=LIMIT, timeout_s=0.1)
    finally:
        directory.close()


def test_the_directory_is_private_and_goes_away() -> None:
    directory = PrivateDirectory()
    status = directory.path.stat()
    assert stat.S_IMODE(status.st_mode) == 0o700
    assert status.st_uid == os.geteuid()
    assert len(os.fsencode(directory.endpoint.removeprefix("ipc://"))) <= 107
    directory.close()
    assert not directory.path.exists()
    directory.close()


def test_a_path_that_is_too_long_is_refused_with_its_length(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    with pytest.raises(SocketPathError, match=r"bytes, more than 10\d[\s\S]*--runtime-dir"):
        PrivateDirectory(str(deep))
    assert not list(deep.iterdir())


def test_a_long_default_falls_back_to_a_short_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    directory = PrivateDirectory()
    assert not directory.path.is_relative_to(deep)
    directory.close()


def test_a_missing_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SocketPathError, match="--runtime-dir"):
        PrivateDirectory(str(tmp_path / "absent"))


def test_stale_directories_are_removed_and_live_ones_kept(tmp_path_factory: pytest.TempPathFactory) -> None:
    import tempfile

    base = Path(tempfile.mkdtemp(dir="/tmp"))
    live = PrivateDirectory(str(base))
    dead = base / "tokenspeed-dead"
    young = base / "tokenspeed-young"
    for path in (dead, young):
        path.mkdir(mode=0o700)
        (path / "lock").touch()
    for path in (live.path, dead):
        os.utime(path, (time.time() - 3600,) * 2)
    another = PrivateDirectory(str(base))
    assert live.path.exists()
    assert young.exists()
    assert not dead.exists()
    another.close()
    live.close()
    for path in sorted(young.iterdir()):
        path.unlink()
    young.rmdir()
    base.rmdir()
