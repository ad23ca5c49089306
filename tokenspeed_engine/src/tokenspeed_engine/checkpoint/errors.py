"""What can be wrong with a model on disk."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint cannot be used; the message says which file or tensor, why, and what to do."""


class ModelNotFoundError(CheckpointError):
    """There is no such model: no file or folder of that name, and no Hugging Face repository that can be reached."""


class UnsupportedCheckpointError(CheckpointError):
    """The checkpoint is sound but of a kind that is refused: a pickle, an unknown architecture or quantization."""


class CorruptCheckpointError(CheckpointError):
    """A file is truncated or contradicts itself."""
