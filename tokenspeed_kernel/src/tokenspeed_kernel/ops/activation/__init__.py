"""Activation ops."""

from tokenspeed_kernel.ops.activation.api import gelu_and_mul, silu_and_mul, swiglu_clamped

__all__ = ["gelu_and_mul", "silu_and_mul", "swiglu_clamped"]
