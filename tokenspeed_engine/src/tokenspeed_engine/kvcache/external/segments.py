"""A file of slots for pages, mapped into memory: the part of the file store that knows its bytes.

    4,096 bytes      header: magic, version, bytes of a page, number of slots, their digest
    slots * 128      one entry for each slot: magic, key, digest of the page, number of the write, digest of these; last use
    slots * stride   the pages, each at a multiple of 4,096 bytes

There is no other index: the entries are the index, read when the file is opened. An entry is cleared before its page is
overwritten, and written after it. So a process that is killed at any moment leaves an entry that is whole or none; after a power
failure, which may keep the entry and lose the page, the page's digest does not fit.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np

from tokenspeed_engine.kvcache.external.base import KEY_BYTES, PageBytes

_BLOCK = 4096
_FILE = struct.Struct("<8sIIQQ16s")
_FILE_MAGIC = b"TSKVSEG\0"
_VERSION = 1
_ENTRY_BYTES = 128
_ENTRY = struct.Struct(f"<8s{KEY_BYTES}s16sQ16s")
_ENTRY_MAGIC = b"TSKVPAGE"
_LAST_USE = struct.Struct("<Q")  # behind the entry and not under its digest: it changes with each use, and only orders evictions


@dataclass(frozen=True, slots=True)
class Entry:
    """What a slot says that it holds.

    Attributes:
        key: of the page.
        digest: of its bytes, see `page_digest`.
        written: number of the write.
        last_use: counter of uses.
    """

    key: bytes
    digest: bytes
    written: int
    last_use: int


class SegmentError(Exception):
    """The file is not a segment of this geometry: another version, another page, cut short, or not ours at all."""


def _round_up(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK


def segment_bytes(page_bytes: int, num_slots: int) -> int:
    """Size of a file."""
    return _BLOCK + _round_up(num_slots * _ENTRY_BYTES) + num_slots * _round_up(page_bytes)


def slots_in(page_bytes: int, size_bytes: int) -> int:
    """Most slots of a file of at most `size_bytes`; 0 where not one has room."""
    slots = max(0, (size_bytes - _BLOCK) // (_round_up(page_bytes) + _ENTRY_BYTES))
    while slots > 0 and segment_bytes(page_bytes, slots) > size_bytes:
        slots -= 1
    return slots


class Segment:
    """An open file.

    Args:
        path: of a file that `create` made.
        page_bytes: bytes of a page.
        num_slots: pages that it has room for.
    Raises:
        SegmentError: the file is something else.  OSError: it cannot be opened.
    """

    def __init__(self, path: Path, page_bytes: int, num_slots: int) -> None:
        self.path, self.num_slots, self._page_bytes = path, num_slots, page_bytes
        self._stride = _round_up(page_bytes)
        self._pages_at = _BLOCK + _round_up(num_slots * _ENTRY_BYTES)
        size = segment_bytes(page_bytes, num_slots)
        with open(path, "r+b") as file:
            found = os.fstat(file.fileno()).st_size
            # Looked at before it is mapped: a page beyond the end of a mapped file kills the process that touches it.
            if found != size:
                raise SegmentError(f"{path}: expected {size:,} bytes, got {found:,}")
            if file.read(_FILE.size) != _file_header(page_bytes, num_slots):
                raise SegmentError(f"{path}: expected version {_VERSION} with {num_slots} slots for pages of {page_bytes:,} bytes")
            self._map = mmap.mmap(file.fileno(), size)
        self._bytes = np.frombuffer(self._map, dtype=np.uint8)

    @staticmethod
    def create(path: Path, page_bytes: int, num_slots: int) -> Segment:
        """Make an empty file; it has its name only once it is whole.

        Raises:
            OSError: no room on the disk: all of it is taken now, since a mapped file has no way to say later that there is none.
        """
        partial = path.with_suffix(".partial")
        try:
            with open(partial, "wb") as file:
                os.posix_fallocate(file.fileno(), 0, segment_bytes(page_bytes, num_slots))
                file.write(_file_header(page_bytes, num_slots))
            os.replace(partial, path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise
        return Segment(path, page_bytes, num_slots)

    def entries(self) -> Iterator[tuple[int, Entry]]:
        """(slot, entry) of all slots whose entry is whole."""
        for slot in range(self.num_slots):
            at = self._entry_at(slot)
            magic, key, digest, written, check = _ENTRY.unpack_from(self._map, at)
            if magic == _ENTRY_MAGIC and check == _entry_check(key, digest, written):
                yield slot, Entry(key, digest, written, *_LAST_USE.unpack_from(self._map, at + _ENTRY.size))

    def page(self, slot: int) -> PageBytes:
        """The slot's page, a view."""
        at = self._pages_at + slot * self._stride
        return self._bytes[at : at + self._page_bytes]

    def clear(self, slot: int) -> None:
        """Forget what the slot holds."""
        at = self._entry_at(slot)
        self._map[at : at + _ENTRY_BYTES] = bytes(_ENTRY_BYTES)

    def fill(self, slot: int, entry: Entry, page: PageBytes) -> None:
        """Write a page, then its entry."""
        self.clear(slot)
        self.page(slot)[:] = page
        at = self._entry_at(slot)
        check = _entry_check(entry.key, entry.digest, entry.written)
        _LAST_USE.pack_into(self._map, at + _ENTRY.size, entry.last_use)
        _ENTRY.pack_into(self._map, at, _ENTRY_MAGIC, entry.key, entry.digest, entry.written, check)

    def use(self, slot: int, last_use: int) -> None:
        """Note a use."""
        _LAST_USE.pack_into(self._map, self._entry_at(slot) + _ENTRY.size, last_use)

    def close(self) -> None:
        """Unmap the file, which the system writes to the disk in its own time; no view of a page may be left."""
        del self._bytes
        self._map.close()

    def _entry_at(self, slot: int) -> int:
        if not 0 <= slot < self.num_slots:
            raise IndexError(f"segment {self.path}: expected a slot in 0..{self.num_slots - 1}, got {slot}")
        return _BLOCK + slot * _ENTRY_BYTES


def _file_header(page_bytes: int, num_slots: int) -> bytes:
    numbers = struct.pack("<QQ", page_bytes, num_slots)
    return _FILE.pack(_FILE_MAGIC, _VERSION, 0, page_bytes, num_slots, blake2b(numbers, digest_size=16).digest())


def _entry_check(key: bytes, digest: bytes, written: int) -> bytes:
    return blake2b(key + digest + written.to_bytes(8, "little"), digest_size=16).digest()
