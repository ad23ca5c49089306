"""Matrix products."""

from tokenspeed_kernel.ops.gemm.api import mm
from tokenspeed_kernel.ops.gemm.grouped import bmm, grouped_mm_contiguous, grouped_mm_masked
from tokenspeed_kernel.ops.gemm.packed import PackedWeight, pack_weight, packing_kernel

__all__ = ["PackedWeight", "bmm", "grouped_mm_contiguous", "grouped_mm_masked", "mm", "pack_weight", "packing_kernel"]
