"""Normalization ops."""

from tokenspeed_kernel.ops.norm.api import fused_add_rms_norm, rms_norm

__all__ = ["fused_add_rms_norm", "rms_norm"]
