"""Safetensors files as a checkpoint: one file, or several behind an index."""

from __future__ import annotations

import json
import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch

from tokenspeed_engine.checkpoint.base import Checkpoint, eos_ids
from tokenspeed_engine.checkpoint.errors import CheckpointError, CorruptCheckpointError, UnsupportedCheckpointError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_MAX_HEADER_BYTES = 100_000_000
_ELEMENT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True, slots=True)
class _Entry:
    file: str
    shape: tuple[int, ...]
    num_bytes: int


class SafetensorsCheckpoint(Checkpoint):
    """A folder with config.json and safetensors files, or one such file with its config.json beside it.

    Args:
        path: the folder or the file.
    Raises:
        CorruptCheckpointError: a file is truncated or contradicts the index; the tensor or file is named.
        UnsupportedCheckpointError: a tensor is not of a float type.  CheckpointError: a file is missing.
    """

    format = "safetensors"

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        given = Path(path)
        folder = given if given.is_dir() else given.parent
        self.config: dict[str, Any] = read_json(folder / "config.json")
        generation = folder / "generation_config.json"
        extra = read_json(generation).get("eos_token_id") if generation.exists() else None
        text_config = self.config.get("text_config")
        nested = text_config.get("eos_token_id") if isinstance(text_config, dict) else None
        try:
            # The generation configuration is the newer word; the model's own id stays a stop token as well.
            self.eos_token_ids = eos_ids(extra, self.config.get("eos_token_id"), nested)
        except ValueError as error:
            raise CorruptCheckpointError(f"{folder}: {error}") from error
        self._entries = self._single(given) if given.is_file() else self._folder(given)
        self._open: dict[str, Any] = {}

    def names(self) -> tuple[str, ...]:
        """Names of all tensors, in file order."""
        return tuple(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""
        return self._entries[name].shape

    def size_bytes(self, name: str) -> int:
        """Bytes that the tensor takes in the file."""
        return self._entries[name].num_bytes

    def read(self, name: str) -> torch.Tensor:
        """Read one tensor; see `Checkpoint.read`."""
        file = self._entries[name].file
        try:
            if file not in self._open:
                self._open[file] = safetensors.safe_open(file, framework="pt", device="cpu")
            tensor = self._open[file].get_tensor(name)
        except (safetensors.SafetensorError, OSError) as error:
            raise CorruptCheckpointError(f"safetensors {file}: tensor {name!r}: {error}. Fix: download the file again.") from error
        assert isinstance(tensor, torch.Tensor)
        return tensor

    def _single(self, path: Path) -> dict[str, _Entry]:
        return read_header(path)

    def _folder(self, folder: Path) -> dict[str, _Entry]:
        if (folder / INDEX_FILE).exists():
            return self._indexed(folder)
        if (folder / SINGLE_FILE).exists():
            return read_header(folder / SINGLE_FILE)
        files = sorted(folder.glob("*.safetensors"))
        if len(files) != 1:
            raise CheckpointError(
                f"safetensors {folder}: expected {INDEX_FILE}, {SINGLE_FILE} or exactly one .safetensors file, "
                f"found {len(files)} such files and no index. Fix: fetch the index as well."
            )
        return read_header(files[0])

    def _indexed(self, folder: Path) -> dict[str, _Entry]:
        index = folder / INDEX_FILE
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
            raise CorruptCheckpointError(f"safetensors {index}: expected a weight_map of names to files. Fix: download it again.")
        headers: dict[str, dict[str, _Entry]] = {}
        entries: dict[str, _Entry] = {}
        for name, file in weight_map.items():
            if file not in headers:
                if Path(file).name != file or not file.endswith(".safetensors"):
                    # The index comes from a stranger: it must not lead out of the folder, nor to a pickle.
                    raise CorruptCheckpointError(
                        f"safetensors {index}: tensor {name!r} points to {file!r}, not a file of this folder"
                    )
                if not (folder / file).exists():
                    raise CheckpointError(f"safetensors {index}: {file} (holds {name!r}) is missing. Fix: download it.")
                headers[file] = read_header(folder / file)
            if name not in headers[file]:
                raise CorruptCheckpointError(f"safetensors {folder / file}: tensor {name!r} of the index is not in it")
            entries[name] = headers[file][name]
        return entries


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        CheckpointError: the file is missing.  CorruptCheckpointError: it is not a JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing. Fix: fetch it; it stands beside the weights.") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CorruptCheckpointError(f"{path}: not JSON: {error}. Fix: download it again.") from error
    if not isinstance(value, dict):
        raise CorruptCheckpointError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def read_header(path: Path) -> dict[str, _Entry]:
    """The directory of a safetensors file, each entry held against the size of the file.

    Raises:
        CorruptCheckpointError: truncated; the first tensor that is cut is named.
        UnsupportedCheckpointError: a tensor is not of a float type.
    Source: the safetensors format (8-byte length, JSON header, data).
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else _MAX_HEADER_BYTES + 1
        if length > min(_MAX_HEADER_BYTES, size - 8):
            raise _corrupt(path, f"its header of {length} bytes does not fit a file of {size} bytes")
        raw = file.read(length)
    try:
        header = json.loads(raw)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise _corrupt(path, f"its header is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise _corrupt(path, "its header is not an object")
    entries: dict[str, _Entry] = {}
    for name, facts in header.items():
        if name == "__metadata__":
            continue
        try:
            dtype, shape = facts["dtype"], tuple(int(n) for n in facts["shape"])
            start, end = (int(n) for n in facts["data_offsets"])
        except (KeyError, TypeError, ValueError) as error:
            raise _corrupt(path, f"tensor {name!r}: its entry is malformed ({error})") from error
        if dtype not in _ELEMENT_BYTES:
            raise UnsupportedCheckpointError(
                f"safetensors {path}: tensor {name!r} is {dtype}; expected one of {', '.join(_ELEMENT_BYTES)}. "
                "Fix: use the unquantized checkpoint."
            )
        if min(shape, default=0) < 0 or end - start != math.prod(shape) * _ELEMENT_BYTES[dtype]:
            raise _corrupt(path, f"tensor {name!r}: {dtype} of shape {shape} does not take {end - start} bytes")
        if start < 0 or 8 + length + end > size:
            raise _corrupt(path, f"tensor {name!r} ends at byte {8 + length + end}, the file has {size}")
        entries[name] = _Entry(str(path), shape, end - start)
    return entries


def _corrupt(path: Path, what: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"safetensors {path}: corrupt or truncated: {what}. Fix: download the file again.")
