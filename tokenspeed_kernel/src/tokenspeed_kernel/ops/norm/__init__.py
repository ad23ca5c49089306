"""Normalization ops."""

from tokenspeed_kernel.ops.norm.api import fused_add_rms_norm, rms_norm
from tokenspeed_kernel.ops.norm.gated import gated_rms_norm
from tokenspeed_kernel.ops.norm.gemma import fused_add_gemma_rms_norm, gemma_rms_norm
from tokenspeed_kernel.ops.norm.layer_norm import layer_norm

__all__ = [
    "fused_add_gemma_rms_norm",
    "fused_add_rms_norm",
    "gated_rms_norm",
    "gemma_rms_norm",
    "layer_norm",
    "rms_norm",
]
