"""A GGUF file as a checkpoint with Hugging Face names."""

from __future__ import annotations

import os
from typing import Any

import torch

from tokenspeed_engine.checkpoint.base import Checkpoint, StoredBlocks, eos_ids
from tokenspeed_engine.checkpoint.errors import CorruptCheckpointError
from tokenspeed_engine.checkpoint.gguf_config import ROPE_FACTORS, hf_config, hf_name
from tokenspeed_engine.checkpoint.gguf_metadata import GgufError, read_gguf_metadata
from tokenspeed_engine.checkpoint.gguf_tensors import GgufTensors

_EMBEDDING = "token_embd.weight"


class GgufCheckpoint(Checkpoint):
    """A GGUF file, memory-mapped; `read` dequantizes, `read_stored` gives the blocks.

    Args:
        path: the file.
    Raises:
        CorruptCheckpointError: truncated or contradictory.  UnsupportedCheckpointError: architecture, rope scaling or tensor
        type that is not known.
    """

    format = "gguf"

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        try:
            metadata = read_gguf_metadata(self.path)
        except GgufError as error:
            raise CorruptCheckpointError(str(error)) from error
        self._tensors = GgufTensors(metadata)
        entries = self._tensors.entries
        if _EMBEDDING not in entries:
            raise CorruptCheckpointError(f"gguf {self.path}: no tensor {_EMBEDDING!r}. Fix: convert the model again.")
        factors = self._tensors.read(ROPE_FACTORS) if ROPE_FACTORS in entries else None
        self.config: dict[str, Any] = hf_config(metadata, self.path, set(entries), factors, entries[_EMBEDDING].shape[0])
        ids = [metadata.get(f"tokenizer.ggml.{key}") for key in ("eos_token_id", "eot_token_id", "eom_token_id")]
        try:
            self.eos_token_ids = eos_ids(*ids)
        except ValueError as error:
            raise CorruptCheckpointError(f"gguf {self.path}: {error}") from error
        # llama's converter stores q and k so that rotation pairs neighbours; the others keep Hugging Face's order.
        self._is_permuted = metadata.get("general.architecture") in ("llama", "mistral")
        self._names = {hf_name(name): name for name in entries if name != ROPE_FACTORS}

    def names(self) -> tuple[str, ...]:
        """Names of all tensors, in file order."""
        return tuple(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""
        return self._tensors.entries[self._names[name]].shape

    def size_bytes(self, name: str) -> int:
        """Bytes that the tensor takes in the file."""
        return self._tensors.size_bytes(self._names[name])

    def read(self, name: str) -> torch.Tensor:
        """Read one tensor; see `Checkpoint.read`."""
        return self._in_order(name, self._tensors.read(self._names[name]))

    def stored_format(self, name: str) -> str | None:
        """See `Checkpoint.stored_format`."""
        stored = self._tensors.format_of(self._names[name])
        return stored.name if stored.decode is not None and len(self.shape(name)) == 2 else None

    def read_stored(self, name: str) -> StoredBlocks:
        """See `Checkpoint.read_stored`. Blocks run along a row, so that whole rows can change places."""
        stored = self.stored_format(name)
        if stored is None:
            return super().read_stored(name)
        facts = self._tensors.format_of(self._names[name])
        data = self._tensors.raw(self._names[name]).view(self.shape(name)[0], -1)
        return StoredBlocks(stored, facts.block_elements, facts.block_bytes, self._in_order(name, data))

    def _in_order(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        if self._is_permuted and ".self_attn.q_proj." in name:
            return _unpermute(rows, self.config["num_attention_heads"], name, self.path)
        if self._is_permuted and ".self_attn.k_proj." in name:
            return _unpermute(rows, self.config["num_key_value_heads"], name, self.path)
        return rows


def _unpermute(tensor: torch.Tensor, num_heads: int, name: str, path: str) -> torch.Tensor:
    """Rows of each head from (pair, half) order back to (half, pair): all first halves, then all second halves."""
    rows = tensor.shape[0]
    if rows % (2 * num_heads):
        raise CorruptCheckpointError(f"gguf {path}: tensor {name!r}: {rows} rows are not {num_heads} heads of even size")
    split = tensor.view(num_heads, rows // num_heads // 2, 2, *tensor.shape[1:])
    return split.transpose(1, 2).reshape(tensor.shape)
