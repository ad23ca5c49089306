"""Embedding ops."""

from tokenspeed_kernel.ops.embedding.api import embedding

__all__ = ["embedding"]
