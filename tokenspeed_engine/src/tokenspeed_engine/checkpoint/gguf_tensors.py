"""The tensor directory of a GGUF file, and its tensors through a memory map."""

from __future__ import annotations

import math
import mmap
import struct
import warnings
from dataclasses import dataclass

import torch

from tokenspeed_engine.checkpoint.errors import CorruptCheckpointError, UnsupportedCheckpointError
from tokenspeed_engine.checkpoint.gguf_metadata import GgufMetadata
from tokenspeed_engine.checkpoint.gguf_quants import FORMATS, TensorFormat, dequantize

_MAX_DIMENSIONS = 4
_MAX_NAME_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of the directory.

    Attributes:
        name: name in the file.
        shape: outermost dimension first, as PyTorch counts.
        type_number: GGML type.
        start: first byte in the file.
    """

    name: str
    shape: tuple[int, ...]
    type_number: int
    start: int


class GgufTensors:
    """Tensors of a GGUF file by the file's own names; the file stays mapped while this object lives.

    Args:
        metadata: what `read_gguf_metadata` returned for the file.
    Raises:
        CorruptCheckpointError: the directory is cut, repeats a name, or points outside the file.
        UnsupportedCheckpointError: a tensor has a type that cannot be read.
    """

    def __init__(self, metadata: GgufMetadata) -> None:
        self._path = metadata.path
        with open(metadata.path, "rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        with warnings.catch_warnings():
            # The map is read-only and torch warns that its tensors would be writable; nothing here writes to them.
            warnings.simplefilter("ignore", UserWarning)
            self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self.entries = self._read_directory(metadata)

    def format_of(self, name: str) -> TensorFormat:
        """The storage format of a tensor."""
        return FORMATS[self.entries[name].type_number]

    def size_bytes(self, name: str) -> int:
        """Bytes of a tensor in the file."""
        entry = self.entries[name]
        tensor_format = FORMATS[entry.type_number]
        return math.prod(entry.shape) // tensor_format.block_elements * tensor_format.block_bytes

    def read(self, name: str) -> torch.Tensor:
        """A tensor, dequantized to float32 where it is quantized."""
        entry = self.entries[name]
        return dequantize(self.raw(name), FORMATS[entry.type_number]).view(entry.shape)

    def raw(self, name: str) -> torch.Tensor:
        """The bytes of a tensor, as a view of the mapped file; read-only."""
        start = self.entries[name].start
        return self._bytes[start : start + self.size_bytes(name)]

    def _read_directory(self, metadata: GgufMetadata) -> dict[str, TensorEntry]:
        entries: list[TensorEntry] = []
        names: set[str] = set()
        at = metadata.tensor_directory_offset
        for index in range(metadata.tensor_count):
            label = f"tensor {index} of {metadata.tensor_count}"
            (length,), at = self._unpack("<Q", at, label)
            if length > min(_MAX_NAME_BYTES, len(self._map) - at):
                raise self._corrupt(f"{label}: its name has {length} bytes")
            try:
                name = self._map[at : at + length].decode("utf-8")
            except UnicodeDecodeError as error:
                raise self._corrupt(f"{label}: its name is not UTF-8") from error
            at += length
            (num_dims,), at = self._unpack("<I", at, name)
            if not 1 <= num_dims <= _MAX_DIMENSIONS:
                raise self._corrupt(f"tensor {name!r}: expected 1 to {_MAX_DIMENSIONS} dimensions, got {num_dims}")
            dims, at = self._unpack(f"<{num_dims}Q", at, name)
            (type_number, offset), at = self._unpack("<IQ", at, name)
            if name in names:
                raise self._corrupt(f"tensor {name!r} appears twice")
            names.add(name)
            entries.append(TensorEntry(name, tuple(reversed(dims)), type_number, offset))
        data_start = -(-at // metadata.alignment) * metadata.alignment
        return {e.name: self._placed(e, data_start, metadata.alignment) for e in entries}

    def _placed(self, entry: TensorEntry, data_start: int, alignment: int) -> TensorEntry:
        tensor_format = FORMATS.get(entry.type_number)
        if tensor_format is None:
            known = ", ".join(f.name for f in FORMATS.values())
            raise UnsupportedCheckpointError(
                f"gguf {self._path}: tensor {entry.name!r} has GGML type {entry.type_number}; expected one of {known}. "
                "Fix: quantize the model to one of those types."
            )
        if entry.shape[-1] % tensor_format.block_elements:
            raise self._corrupt(
                f"tensor {entry.name!r}: a row of {entry.shape[-1]} elements is not whole {tensor_format.name} blocks"
            )
        if entry.start % alignment:
            raise self._corrupt(f"tensor {entry.name!r}: offset {entry.start} is not a multiple of {alignment}")
        start = data_start + entry.start
        size = math.prod(entry.shape) // tensor_format.block_elements * tensor_format.block_bytes
        if start + size > len(self._map):
            raise self._corrupt(
                f"tensor {entry.name!r} needs bytes {start} to {start + size}, the file has {len(self._map)}"
            )
        return TensorEntry(entry.name, entry.shape, entry.type_number, start)

    def _unpack(self, layout: str, at: int, what: str) -> tuple[tuple[int, ...], int]:
        end = at + struct.calcsize(layout)
        if end > len(self._map):
            raise self._corrupt(f"the tensor directory ends inside {what!r}")
        return struct.unpack_from(layout, self._map, at), end

    def _corrupt(self, what: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(
            f"gguf {self._path}: corrupt or truncated: {what}. Fix: download or convert the file again."
        )
