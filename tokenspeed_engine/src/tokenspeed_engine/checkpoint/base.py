"""A checkpoint: named tensors and a configuration, whatever the file format."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class StoredBlocks:
    """A quantized matrix as the file has it: rows of whole blocks.

    Attributes:
        format: name of the block format, such as Q4_1.
        block_elements: elements of one block.
        block_bytes: bytes of one block.
        data: [rows, bytes of a row] uint8; a view of the file where nothing had to be moved.
    """

    format: str
    block_elements: int
    block_bytes: int
    data: torch.Tensor


class Checkpoint(ABC):
    """Read-only view of a model on disk. Tensor names and configuration keys are Hugging Face's in every format.

    Attributes:
        path: local folder or file.
        format: "gguf" or "safetensors".
        config: the model's configuration, as config.json has it.
        eos_token_ids: ids that end a sequence, from the generation configuration or the file's metadata.
    """

    path: str
    format: str
    config: Mapping[str, Any]
    eos_token_ids: tuple[int, ...]

    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """Names of all tensors, in file order."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it.

        Raises:
            KeyError: there is no such tensor.
        """

    @abstractmethod
    def size_bytes(self, name: str) -> int:
        """Bytes that the tensor takes in the file: the unit of loading progress.

        Raises:
            KeyError: there is no such tensor.
        """

    @abstractmethod
    def read(self, name: str) -> torch.Tensor:
        """Read one tensor.

        Returns:
            A CPU tensor of the stored float type; quantized formats come back as float32.
        Raises:
            KeyError: there is no such tensor.  CorruptCheckpointError: its bytes are not all there.
        """

    def stored_format(self, name: str) -> str | None:
        """Name of the block format in which a matrix is stored, or None for a plain tensor.

        Raises:
            KeyError: there is no such tensor.
        """
        self.shape(name)
        return None

    def read_stored(self, name: str) -> StoredBlocks:
        """Read a matrix that has a `stored_format` without dequantizing it; rows are in the order that `read` gives.

        Raises:
            KeyError: there is no such tensor.  ValueError: it is not stored in blocks.
        """
        raise ValueError(f"{self.path}: tensor {name!r} is not stored in blocks")

    def __contains__(self, name: object) -> bool:
        return name in self.names()


def eos_ids(*values: Any) -> tuple[int, ...]:
    """Join `eos_token_id` entries (an int, a list, or None) in order, without repetition.

    Raises:
        ValueError: an entry is neither.
    """
    found: list[int] = []
    for value in values:
        if value is None:
            continue
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(item, bool) or not isinstance(item, int):
                raise ValueError(f"eos_token_id: expected an int or a list of ints, got {value!r}")
            if item >= 0 and item not in found:
                found.append(item)
    return tuple(found)
