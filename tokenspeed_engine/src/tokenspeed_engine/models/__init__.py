"""Model families, one file each."""

from tokenspeed_engine.models.base import EMBEDDING_TENSOR, CausalLM
from tokenspeed_engine.models.config import DenseConfig
from tokenspeed_engine.models.errors import UnsupportedModelError
from tokenspeed_engine.models.registry import build_model, builders

__all__ = ["EMBEDDING_TENSOR", "CausalLM", "DenseConfig", "UnsupportedModelError", "build_model", "builders"]
