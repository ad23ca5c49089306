"""Matrix products."""

from tokenspeed_kernel.ops.gemm.api import mm

__all__ = ["mm"]
