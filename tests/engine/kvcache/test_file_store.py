"""Pages in files: found again after restarts and kills, never damaged ones, never more than the bound."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tokenspeed_engine.kvcache import KVLayout
from tokenspeed_engine.kvcache.external import ExternalStoreError, FileStore, PageIdentity, file_store
from tokenspeed_engine.kvcache.external.segments import Segment, segment_bytes

PAGE = 6000  # not a multiple of a block
IDENTITY = PageIdentity("weights", "float32", 2, 3, 64, 16)
ROOM = segment_bytes(PAGE, 8)


def key(number: int) -> bytes:
    return sha256(number.to_bytes(8, "little", signed=True)).digest()


def page(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, PAGE, dtype=np.uint8)


def opened(folder: Path, size_bytes: int = ROOM, identity: PageIdentity = IDENTITY) -> FileStore:
    return FileStore(folder, identity, PAGE, size_bytes)


def put(store: FileStore, *numbers: int) -> int:
    return store.put([key(n) for n in numbers], [page(n) for n in numbers])


def got(store: FileStore, *numbers: int) -> int:
    """Reads pages; those that are said to be right are compared."""
    buffers = [np.full(PAGE, 0xEE, dtype=np.uint8) for _ in numbers]
    count = store.get([key(n) for n in numbers], buffers)
    for number, buffer in list(zip(numbers, buffers, strict=True))[:count]:
        assert np.array_equal(buffer, page(number)), f"page {number} is not what was put"
    return count


@pytest.fixture
def store(tmp_path: Path):
    made = opened(tmp_path)
    yield made
    made.close()


def test_what_was_put_comes_back_in_order_up_to_the_first_gap(store: FileStore) -> None:
    assert store.contains_prefix([key(0)]) == 0
    assert put(store, 0, 1, 3) == 3
    numbers = [0, 1, 2, 3]
    assert store.contains_prefix([key(n) for n in numbers]) == 2
    assert got(store, *numbers) == 2
    assert got(store, 3) == 1
    assert got(store) == 0
    assert store.contains_prefix([]) == 0
    assert put(store) == 0
    assert (store.num_corrupted, store.num_evicted) == (0, 0)


def test_a_page_is_put_once(store: FileStore) -> None:
    assert put(store, 5, 5) == 2
    assert len(store) == 1
    assert store.put([key(5)], [page(6)]) == 1, "a key stands for its tokens: the page is there"
    assert got(store, 5) == 1


def test_pages_survive_a_restart(tmp_path: Path) -> None:
    first = opened(tmp_path)
    put(first, *range(5))
    first.close()
    second = opened(tmp_path)
    assert len(second) == 5
    assert got(second, *range(5)) == 5
    second.close()


def test_the_size_is_a_bound_and_the_least_recently_used_go(tmp_path: Path) -> None:
    store = opened(tmp_path)
    put(store, *range(8))
    assert got(store, 0, 1) == 2
    put(store, 8, 9)
    assert store.num_evicted == 2
    assert [number for number in range(10) if store.contains_prefix([key(number)])] == [0, 1, 2, 3, 4, 5, 8, 9]
    store.close()
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.kv")) <= ROOM


def test_the_order_of_use_survives_a_restart(tmp_path: Path) -> None:
    store = opened(tmp_path)
    put(store, *range(8))
    got(store, 6, 7)
    store.close()
    store = opened(tmp_path)
    put(store, *range(10, 16))
    assert store.contains_prefix([key(6), key(7)]) == 2
    store.close()


def test_more_pages_than_one_call_has_room_for(store: FileStore) -> None:
    assert put(store, *range(20)) == 8
    assert store.contains_prefix([key(n) for n in range(20)]) == 8, "the beginning of a prompt is of more use than its end"


def test_files_grow_with_what_is_put(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_store, "_SEGMENT_BYTES", segment_bytes(PAGE, 2))
    store = opened(tmp_path, segment_bytes(PAGE, 2) * 3)
    sizes = []
    for number in range(8):
        put(store, number)
        sizes.append(len(list(tmp_path.rglob("*.kv"))))
    assert sizes == [1, 1, 2, 2, 3, 3, 3, 3]
    assert got(store, *range(2, 8)) == 6
    store.close()
    smaller = opened(tmp_path, segment_bytes(PAGE, 2))
    assert len(list(tmp_path.rglob("*.kv"))) == 1
    assert len(smaller) <= 2
    smaller.close()


@pytest.mark.parametrize("what", [f.name for f in PageIdentity.__dataclass_fields__.values()])
def test_pages_of_another_identity_are_never_found(tmp_path: Path, what: str) -> None:
    store = opened(tmp_path)
    put(store, 0)
    store.close()
    value = getattr(IDENTITY, what)
    other = opened(tmp_path, identity=replace(IDENTITY, **{what: value + ("x" if isinstance(value, str) else 1)}))
    assert len(other) == 0
    other.close()


def test_the_identity_is_that_of_the_layout() -> None:
    layout = KVLayout(2, 3, 64, 16, torch.bfloat16)
    assert PageIdentity.of("w", layout) == PageIdentity("w", "bfloat16", 2, 3, 64, 16)


def test_two_engines_do_not_share_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_store, "_LOCK_PATIENCE_S", 0.1)
    store = opened(tmp_path)
    with pytest.raises(ExternalStoreError, match=r"another engine .* Fix: give each engine a folder of its own"):
        opened(tmp_path)
    other = opened(tmp_path, identity=replace(IDENTITY, model="another"))
    other.close()
    store.close()
    opened(tmp_path).close()


def test_a_folder_that_cannot_be_used_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(ExternalStoreError, match=r"cannot be used.*Fix: name a folder"):
        opened(tmp_path / "file")
    with pytest.raises(ExternalStoreError, match=r"no room for one page of 6,000\. Fix: raise --external-cache-gib"):
        opened(tmp_path, 5000)


def test_every_damaged_byte_of_a_page_is_noticed_and_the_page_dropped(tmp_path: Path) -> None:
    for where in (0, 1, PAGE // 2, PAGE - 1):
        store = opened(tmp_path)
        put(store, 0, 1, 2)
        number, slot, _ = store._slots[key(1)]
        store._segments[number].page(slot)[where] ^= 0x10
        assert got(store, 0, 1, 2) == 1
        assert store.num_corrupted == 1
        assert store.contains_prefix([key(1)]) == 0
        assert put(store, 1) == 1, "it is taken again once it was computed anew"
        assert got(store, 0, 1, 2) == 3
        store.close()


def test_pages_that_changed_places_are_noticed(tmp_path: Path) -> None:
    store = opened(tmp_path)
    put(store, 0, 1)
    (a, slot_a, _), (b, slot_b, _) = store._slots[key(0)], store._slots[key(1)]
    first, second = store._segments[a].page(slot_a), store._segments[b].page(slot_b)
    kept = first.copy()
    first[:], second[:] = second.copy(), kept
    del first, second
    assert got(store, 0) == 0
    assert got(store, 1) == 0
    store.close()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(damage=st.lists(st.tuples(st.integers(0, ROOM - 1), st.integers(1, 255)), max_size=12), length=st.integers(0, ROOM))
def test_whatever_is_done_to_the_file_no_wrong_page_comes_out(tmp_path_factory, damage, length) -> None:
    folder = tmp_path_factory.mktemp("store")
    store = opened(folder)
    put(store, *range(6))
    path = store._segments[0].path
    store.close()
    content = bytearray(path.read_bytes())
    for where, change in damage:
        content[where] ^= change
    path.write_bytes(content if damage else content[:length])
    store = opened(folder)
    for number in range(6):
        got(store, number)  # compares what it gives out
    assert put(store, *range(6, 12)) == 6
    assert got(store, *range(6, 12)) == 6
    store.close()


@pytest.mark.parametrize("content", [b"", b"x", os.urandom(5000)])
def test_a_file_that_is_none_of_ours_is_replaced(tmp_path: Path, content: bytes) -> None:
    store = opened(tmp_path)
    folder = store.folder
    store.close()
    (folder / "segment-00000.kv").write_bytes(content)
    (folder / "segment-00000.partial").write_bytes(content)
    store = opened(tmp_path)
    assert len(store) == 0
    assert put(store, 1) == 1
    assert not list(folder.glob("*.partial"))
    store.close()


def test_a_disk_without_room_ends_the_growth_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_store, "_SEGMENT_BYTES", segment_bytes(PAGE, 2))
    store = opened(tmp_path, segment_bytes(PAGE, 2) * 4)
    put(store, 0, 1)

    def no_room(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_room)
    assert put(store, 2) == 1
    assert store.num_evicted == 1
    assert got(store, 2) == 1
    store.close()
    empty = opened(tmp_path / "other", segment_bytes(PAGE, 2) * 4)
    assert put(empty, 0) == 0, "not a page fits: the engine goes on without"
    empty.close()


def _write_for_ever(folder: str, started: object) -> None:
    store = opened(Path(folder), ROOM)
    number = 0
    while True:
        put(store, number, number + 1)
        number += 2
        if number == 8:
            started.set()  # type: ignore[attr-defined]


@pytest.mark.parametrize("delay_s", [0.0, 0.003, 0.011])
def test_a_writer_that_is_killed_leaves_whole_pages_only(tmp_path: Path, delay_s: float) -> None:
    context = multiprocessing.get_context("fork")
    started = context.Event()
    writer = context.Process(target=_write_for_ever, args=(str(tmp_path), started))
    writer.start()
    assert started.wait(60)
    time.sleep(delay_s)
    os.kill(writer.pid or 0, signal.SIGKILL)
    writer.join(60)
    store = opened(tmp_path)
    numbers = {key(number): number for number in range(200_000)} if len(store) else {}
    assert len(store) >= 7, "at most the page that was being written is lost"
    assert all(got(store, numbers[held]) == 1 for held in list(store._slots))
    assert store.num_corrupted == 0
    store.close()


def test_an_entry_is_written_after_its_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the page's copy ends early, the slot must be empty for whoever opens the file next."""
    store = opened(tmp_path)
    put(store, 0, *range(1, 8))
    real = Segment.page
    monkeypatch.setattr(Segment, "page", lambda self, slot: real(self, slot)[: PAGE // 2])  # the copy does not fit: it raises
    with pytest.raises(ValueError):
        put(store, 99)
    monkeypatch.setattr(Segment, "page", real)
    store.close()
    store = opened(tmp_path)
    assert store.contains_prefix([key(99)]) == 0
    assert len(store) == 7
    store.close()
