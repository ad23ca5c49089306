"""Open a checkpoint of whatever format."""

from __future__ import annotations

import os
from pathlib import Path

from tokenspeed_engine.checkpoint.base import Checkpoint
from tokenspeed_engine.checkpoint.gguf_checkpoint import GgufCheckpoint
from tokenspeed_engine.checkpoint.resolve import resolve_model
from tokenspeed_engine.checkpoint.safetensors_checkpoint import SafetensorsCheckpoint


def open_checkpoint(model: str | os.PathLike[str] = "", revision: str = "") -> Checkpoint:
    """Open a model for reading.

    Args:
        model: see `resolve_model`; empty for the default model.
        revision: of a Hugging Face id.
    Returns:
        A checkpoint with Hugging Face names.
    Raises:
        CheckpointError: not found, refused, or corrupt; the message says which file or tensor.
    """
    path: Path = resolve_model(os.fspath(model), revision)
    return GgufCheckpoint(path) if path.suffix == ".gguf" else SafetensorsCheckpoint(path)
