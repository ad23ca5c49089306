"""Writing to the paged key-value cache."""

from tokenspeed_kernel.ops.kvcache.api import write_kv

__all__ = ["write_kv"]
