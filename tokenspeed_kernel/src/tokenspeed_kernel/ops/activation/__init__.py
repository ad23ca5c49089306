"""Activation ops."""

from tokenspeed_kernel.ops.activation.api import silu_and_mul

__all__ = ["silu_and_mul"]
