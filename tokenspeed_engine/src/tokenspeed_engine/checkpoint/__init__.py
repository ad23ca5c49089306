"""Models on disk: GGUF and safetensors files, by path, folder or Hugging Face id."""

from tokenspeed_engine.checkpoint.base import Checkpoint, StoredBlocks
from tokenspeed_engine.checkpoint.errors import (
    CheckpointError,
    CorruptCheckpointError,
    ModelNotFoundError,
    UnsupportedCheckpointError,
)
from tokenspeed_engine.checkpoint.gguf_checkpoint import GgufCheckpoint
from tokenspeed_engine.checkpoint.gguf_metadata import GgufError, GgufMetadata, is_gguf, read_gguf_metadata
from tokenspeed_engine.checkpoint.opening import open_checkpoint
from tokenspeed_engine.checkpoint.resolve import DEFAULT_MODEL_WHEEL, default_model_path, resolve_model
from tokenspeed_engine.checkpoint.safetensors_checkpoint import SafetensorsCheckpoint

__all__ = [
    "DEFAULT_MODEL_WHEEL",
    "Checkpoint",
    "CheckpointError",
    "CorruptCheckpointError",
    "GgufCheckpoint",
    "GgufError",
    "GgufMetadata",
    "ModelNotFoundError",
    "SafetensorsCheckpoint",
    "StoredBlocks",
    "UnsupportedCheckpointError",
    "default_model_path",
    "is_gguf",
    "open_checkpoint",
    "read_gguf_metadata",
    "resolve_model",
]
