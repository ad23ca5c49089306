"""Metadata of a GGUF file, read without touching its tensors.

A GGUF file comes from strangers. Every length in it is held against the bytes that the file has before anything is allocated
or read, nesting is bounded, and every fault is a GgufError that says where the file went wrong.

Only the key/value section is read (a few MB of a file of many GB). The tensor directory begins at `tensor_directory_offset`.

Source: the GGUF specification, versions 2 and 3 (little endian).
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

GGUF_MAGIC = b"GGUF"
SUPPORTED_VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_ARRAY_DEPTH = 4
MAX_KEY_BYTES = 65_535
# A byte of the file can become an object of 8 bytes and more: a bound keeps a hostile array from taking all memory. Known
# vocabularies are 60 times smaller.
MAX_ARRAY_LENGTH = 2**24

_STRING = 8
_ARRAY = 9
_BOOL = 7
_SCALARS: dict[int, str] = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
_TYPE_NAMES = {
    0: "uint8",
    1: "int8",
    2: "uint16",
    3: "int16",
    4: "uint32",
    5: "int32",
    6: "float32",
    7: "bool",
    8: "string",
    9: "array",
    10: "uint64",
    11: "int64",
    12: "float64",
}
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


class GgufError(ValueError):
    """The file is not a GGUF file that can be read; the message says where and why."""


@dataclass(frozen=True, slots=True)
class GgufMetadata(Mapping[str, Any]):
    """The key/value pairs of a GGUF file, as a mapping; arrays are lists.

    Attributes:
        path: the file.
        version: GGUF version, 2 or 3.
        tensor_count: number of entries in the tensor directory.
        fields: key to value; numbers are int or float, arrays are lists.
        tensor_directory_offset: byte at which the tensor directory begins.
        alignment: bytes to which tensor data is aligned.
    """

    path: str
    version: int
    tensor_count: int
    fields: dict[str, Any]
    tensor_directory_offset: int
    alignment: int

    def __getitem__(self, key: str) -> Any:
        return self.fields[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.fields)

    def __len__(self) -> int:
        return len(self.fields)


def is_gguf(path: str | os.PathLike[str]) -> bool:
    """Whether the path is a file that begins with the GGUF magic."""
    if not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        return file.read(len(GGUF_MAGIC)) == GGUF_MAGIC


def read_gguf_metadata(path: str | os.PathLike[str]) -> GgufMetadata:
    """Read the key/value section of a GGUF file.

    Args:
        path: a GGUF file, version 2 or 3, little endian.
    Returns:
        GgufMetadata.
    Raises:
        FileNotFoundError: there is no such file.  GgufError: truncated, corrupt, of another version or byte order.
    Source: the GGUF specification.
    """
    name = os.fspath(path)
    with open(name, "rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            raise GgufError(f"gguf {name}: expected magic {GGUF_MAGIC!r}, got an empty file. Fix: download the file again.")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data, name).metadata()


class _Reader:
    """A cursor over the mapped file; each read checks the bytes that are left."""

    def __init__(self, data: mmap.mmap, name: str) -> None:
        self._data = data
        self._size = len(data)
        self._at = 0
        self._name = name

    def metadata(self) -> GgufMetadata:
        magic = bytes(self._take(4, "magic"))
        if magic != GGUF_MAGIC:
            raise GgufError(f"gguf {self._name}: expected magic {GGUF_MAGIC!r}, got {magic!r}. Fix: pass a GGUF file.")
        version = self._u32("version")
        if version not in SUPPORTED_VERSIONS:
            hint = " (a big-endian file)" if version & 0xFFFF == 0 and version else ""
            raise GgufError(
                f"gguf {self._name}: expected version in {SUPPORTED_VERSIONS}, got {version}{hint}. "
                "Fix: convert the model again with a current converter."
            )
        tensor_count = self._u64("tensor_count")
        pair_count = self._u64("kv_count")
        # The smallest pair takes 13 bytes (length, type, one-byte value), the smallest tensor entry 24.
        self._check_count(pair_count, 13, "kv_count")
        self._check_count(tensor_count, 24, "tensor_count")
        fields: dict[str, Any] = {}
        for index in range(pair_count):
            key = self._string(f"key {index}", MAX_KEY_BYTES)
            if key in fields:
                raise self._fault(f"key {key!r} appears twice")
            fields[key] = self._value(self._u32(f"type of {key!r}"), key, 0)
        alignment = fields.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise self._fault(f"general.alignment: expected a power of two, got {alignment!r}")
        return GgufMetadata(self._name, version, tensor_count, fields, self._at, alignment)

    def _value(self, kind: int, key: str, depth: int) -> Any:
        code = _SCALARS.get(kind)
        if code is not None:
            raw = struct.unpack("<" + code, self._take(struct.calcsize("<" + code), key))[0]
            return bool(raw) if kind == _BOOL else raw
        if kind == _STRING:
            return self._string(key, self._size)
        if kind == _ARRAY:
            if depth >= MAX_ARRAY_DEPTH:
                raise self._fault(f"{key!r}: arrays nested deeper than {MAX_ARRAY_DEPTH}")
            return self._array(key, depth)
        raise self._fault(f"{key!r}: expected a type in {sorted(_TYPE_NAMES)}, got {kind}")

    def _array(self, key: str, depth: int) -> list[Any]:
        kind = self._u32(f"element type of {key!r}")
        count = self._u64(f"length of {key!r}")
        if count > MAX_ARRAY_LENGTH:
            raise self._fault(f"length of {key!r} is {count}, expected at most {MAX_ARRAY_LENGTH}")
        code = _SCALARS.get(kind)
        if code is not None:
            width = struct.calcsize("<" + code)
            self._check_count(count, width, f"length of {key!r}")
            values = list(struct.unpack(f"<{count}{code}", self._take(count * width, key)))
            return [bool(v) for v in values] if kind == _BOOL else values
        if kind == _STRING:
            self._check_count(count, 8, f"length of {key!r}")
            return self._strings(key, count)
        if kind == _ARRAY:
            self._check_count(count, 12, f"length of {key!r}")
            return [self._value(kind, key, depth + 1) for _ in range(count)]
        raise self._fault(f"{key!r}: expected an element type in {sorted(_TYPE_NAMES)}, got {kind}")

    def _strings(self, key: str, count: int) -> list[str]:
        # A vocabulary has hundreds of thousands of entries: this loop is the time that a start spends here.
        data, size, at = self._data, self._size, self._at
        unpack = _U64.unpack_from
        values: list[str] = []
        for index in range(count):
            if size - at < 8:
                raise self._fault(f"{key!r}[{index}]: the file ends inside the array of {count} strings")
            length = unpack(data, at)[0]
            at += 8
            if length > size - at:
                raise self._fault(f"{key!r}[{index}]: a string of {length} bytes, {size - at} bytes are left")
            values.append(self._text(data[at : at + length], f"{key}[{index}]"))
            at += length
        self._at = at
        return values

    def _string(self, what: str, limit_bytes: int) -> str:
        length = self._u64(f"length of {what}")
        if length > limit_bytes:
            raise self._fault(f"{what}: a string of {length} bytes, expected at most {limit_bytes}")
        return self._text(bytes(self._take(length, what)), what)

    def _text(self, raw: bytes, what: str) -> str:
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self._fault(f"{what}: expected UTF-8, got {raw[:16]!r}") from error

    def _u32(self, what: str) -> int:
        return int(_U32.unpack(self._take(4, what))[0])

    def _u64(self, what: str) -> int:
        return int(_U64.unpack(self._take(8, what))[0])

    def _take(self, count: int, what: str) -> bytes:
        left = self._size - self._at
        if count > left:
            raise self._fault(f"{what}: {count} bytes needed, {left} bytes are left")
        start = self._at
        self._at = start + count
        return self._data[start : self._at]

    def _check_count(self, count: int, least_bytes: int, what: str) -> None:
        left = self._size - self._at
        if count * least_bytes > left:
            raise self._fault(f"{what} is {count}, which needs at least {count * least_bytes} bytes; {left} bytes are left")

    def _fault(self, what: str) -> GgufError:
        return GgufError(
            f"gguf {self._name}: corrupt or truncated near byte {self._at}: {what}. Fix: download or convert the file again."
        )
