"""Matrix products."""

from tokenspeed_kernel.ops.gemm.api import mm
from tokenspeed_kernel.ops.gemm.packed import PackedWeight, pack_weight

__all__ = ["PackedWeight", "mm", "pack_weight"]
