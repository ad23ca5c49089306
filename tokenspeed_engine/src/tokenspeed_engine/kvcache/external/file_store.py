"""The third tier in local files."""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tokenspeed_engine.kvcache.external.base import ExternalStore, ExternalStoreError, PageBytes, PageIdentity, page_digest
from tokenspeed_engine.kvcache.external.segments import Entry, Segment, SegmentError, segment_bytes, slots_in

logger = logging.getLogger(__name__)

_SEGMENT_BYTES = 256 * 2**20
_LOCK_PATIENCE_S = 5.0  # a core that was killed lets go when the system has taken its memory down, which takes a moment
_READERS = 4  # threads that copy and check pages: one digest runs at about 0.8 GB/s


class FileStore(ExternalStore):
    """Pages in files of a folder, for one identity; least recently used pages make room.

    Each identity has a folder of its own, `<folder>/<digest>`, with `identity.json`, `lock` and the segments. One engine at a time
    may have it open.

    Args:
        folder: made where it is missing.
        identity: whose pages.
        page_bytes: bytes of a page.
        size_bytes: most bytes that the files of this identity take.
    Raises:
        ExternalStoreError: the folder cannot be used, another engine uses it, or not one page fits.
    """

    def __init__(self, folder: str | Path, identity: PageIdentity, page_bytes: int, size_bytes: int) -> None:
        if page_bytes < 1:
            raise ValueError(f"file store: expected pages of 1 byte or more, got {page_bytes}")
        self._page_bytes = page_bytes
        self._folder = Path(folder).expanduser() / identity.digest
        self._slots_of_file, self._max_files = _geometry(page_bytes, size_bytes)
        self._segments: list[Segment] = []
        self._slots: OrderedDict[bytes, tuple[int, int, Entry]] = OrderedDict()  # least recently used first
        self._free: list[tuple[int, int]] = []
        self._now = 0
        self._is_full = False
        self.num_evicted = 0
        self._lock_fd = self._lock(identity)
        try:
            self._open_segments()
        except OSError as error:
            os.close(self._lock_fd)
            raise ExternalStoreError(f"file store: {self._folder}: {error}. Fix: mend or remove the folder") from error
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="kv-file-store")

    @property
    def folder(self) -> Path:
        """Where this identity's files are."""
        return self._folder

    def __len__(self) -> int:
        return len(self._slots)

    def contains_prefix(self, keys: Sequence[bytes]) -> int:
        """See `ExternalStore.contains_prefix`."""
        count = next((index for index, key in enumerate(keys) if key not in self._slots), len(keys))
        # The last page is marked first: it is the first to go, since without it those before are still of use.
        for key in reversed(keys[:count]):
            self._use(key)
        return count

    def get(self, keys: Sequence[bytes], pages: Sequence[PageBytes]) -> int:
        """See `ExternalStore.get`."""
        count = next((index for index, key in enumerate(keys) if key not in self._slots), len(keys))
        right = list(self._readers.map(self._read, keys[:count], pages[:count]))
        for key in reversed(keys[:count]):
            self._use(key)
        for key in (key for key, is_right in zip(keys, right, strict=False) if not is_right):
            logger.warning(
                "file store: page %s in %s is damaged and dropped; its tokens are computed anew", key.hex(), self._folder
            )
            self.num_corrupted += 1
            self._drop(key)
        return right.index(False) if False in right else count

    def put(self, keys: Sequence[bytes], pages: Sequence[PageBytes]) -> int:
        """See `ExternalStore.put`."""
        fresh = [(key, page) for key, page in zip(keys, pages, strict=True) if key not in self._slots]
        digests = list(self._readers.map(page_digest, *zip(*fresh, strict=True))) if fresh else []
        for (key, page), digest in reversed(list(zip(fresh, digests, strict=True))):
            if key not in self._slots:
                self._write(key, page, digest)
        return sum(key in self._slots for key in keys)

    def close(self) -> None:
        """See `ExternalStore.close`."""
        self._readers.shutdown()
        for segment in self._segments:
            segment.close()
        self._segments.clear()
        self._slots.clear()
        os.close(self._lock_fd)

    # -- pages ------------------------------------------------------------------------------------------------------------

    def _read(self, key: bytes, page: PageBytes) -> bool:
        number, slot, entry = self._slots[key]
        page[:] = self._segments[number].page(slot)
        # The copy is checked, not the file: the file could change in between.
        return page_digest(key, page) == entry.digest

    def _write(self, key: bytes, page: PageBytes, digest: bytes) -> None:
        place = self._room()
        if place is None:
            return
        number, slot = place
        self._now += 1
        entry = Entry(key, digest, self._now, self._now)
        self._segments[number].fill(slot, entry, page)
        self._slots[key] = number, slot, entry

    def _room(self) -> tuple[int, int] | None:
        """A slot that holds nothing: a free one, one of a new file, or that of the page that was used longest ago."""
        if not self._free and len(self._segments) < self._max_files and not self._is_full:
            try:
                self._add_segment(Segment.create(self._path(len(self._segments)), self._page_bytes, self._slots_of_file))
            except OSError as error:
                self._is_full = True
                logger.warning("file store: %s does not grow any more: %s", self._folder, error)
        if self._free:
            return self._free.pop()
        if not self._slots:
            return None
        self.num_evicted += 1
        self._drop(next(iter(self._slots)))
        return self._free.pop()

    def _use(self, key: bytes) -> None:
        number, slot, _ = self._slots[key]
        self._now += 1
        self._segments[number].use(slot, self._now)
        self._slots.move_to_end(key)

    def _drop(self, key: bytes) -> None:
        number, slot, _ = self._slots.pop(key)
        self._segments[number].clear(slot)
        self._free.append((number, slot))

    # -- files ------------------------------------------------------------------------------------------------------------

    def _path(self, number: int) -> Path:
        return self._folder / f"segment-{number:05d}.kv"

    def _lock(self, identity: PageIdentity) -> int:
        fd = -1
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            fd = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            deadline_s = time.monotonic() + _LOCK_PATIENCE_S
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline_s:
                        raise
                    time.sleep(0.05)
            (self._folder / "identity.json").write_text(identity.as_json() + "\n", encoding="utf-8")
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            if isinstance(error, BlockingIOError):
                raise ExternalStoreError(
                    f"file store: another engine with the same model uses {self._folder}. "
                    "Fix: give each engine a folder of its own (--external-cache-path)"
                ) from error
            raise ExternalStoreError(
                f"file store: {self._folder} cannot be used: {error}. "
                "Fix: name a folder that this user may write (--external-cache-path)"
            ) from error
        return fd

    def _open_segments(self) -> None:
        """Take over what earlier engines left, as far as it is whole."""
        for path in self._folder.glob("*.partial"):
            path.unlink()
        known = [self._path(number) for number in range(self._max_files)]
        for path in set(self._folder.glob("segment-*.kv")) - set(known):
            path.unlink()  # a smaller size was configured
        for path in known:
            if not path.exists():
                continue
            try:
                segment = Segment(path, self._page_bytes, self._slots_of_file)
            except SegmentError as error:
                logger.warning("file store: %s; the file is dropped", error)
                path.unlink()
                continue
            # Numbers have no gaps: a file that was dropped leaves its name to the last.
            target = self._path(len(self._segments))
            if target != path:
                os.replace(path, target)
                segment.path = target
            self._segments.append(segment)
        found: list[tuple[int, int, Entry]] = []
        for number, segment in enumerate(self._segments):
            held = dict(segment.entries())
            self._free += [(number, slot) for slot in reversed(range(segment.num_slots)) if slot not in held]
            found += [(number, slot, entry) for slot, entry in held.items()]
        for number, slot, entry in sorted(found, key=lambda one: (one[2].last_use, one[2].written)):
            if entry.key in self._slots:
                self._drop(entry.key)
            self._slots[entry.key] = number, slot, entry
            self._now = max(self._now, entry.last_use, entry.written)

    def _add_segment(self, segment: Segment) -> None:
        number = len(self._segments)
        self._segments.append(segment)
        self._free += [(number, slot) for slot in reversed(range(segment.num_slots))]


def _geometry(page_bytes: int, size_bytes: int) -> tuple[int, int]:
    """(slots of a file, files): files of about 256 MiB, at least one page each."""
    slots = min(max(1, slots_in(page_bytes, _SEGMENT_BYTES)), slots_in(page_bytes, size_bytes))
    if slots < 1:
        raise ExternalStoreError(
            f"file store: {size_bytes:,} bytes have no room for one page of {page_bytes:,}. Fix: raise --external-cache-gib"
        )
    return slots, max(1, size_bytes // segment_bytes(page_bytes, slots))
