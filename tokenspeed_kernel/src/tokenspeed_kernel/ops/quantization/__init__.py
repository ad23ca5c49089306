"""Scaled number formats: to and from plain tensors."""

from tokenspeed_kernel.ops.quantization.dequantize import dequantize

__all__ = ["dequantize"]
