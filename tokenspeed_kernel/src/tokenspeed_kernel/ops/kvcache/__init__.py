"""The paged key-value cache: writing to it, in fp8 too and straight from the rotation, and moving its pages."""

from tokenspeed_kernel.ops.kvcache.api import write_kv
from tokenspeed_kernel.ops.kvcache.pages import copy_pages, transfer_pages
from tokenspeed_kernel.ops.kvcache.rope_write import rope_write_kv
from tokenspeed_kernel.ops.kvcache.scaled import quantize_kv, write_scaled_kv

__all__ = ["copy_pages", "quantize_kv", "rope_write_kv", "transfer_pages", "write_kv", "write_scaled_kv"]
