"""Scaled number formats: to and from plain tensors."""

from tokenspeed_kernel.ops.quantization.dequantize import dequantize
from tokenspeed_kernel.ops.quantization.quantize import empty_quantized, quantize

__all__ = ["dequantize", "empty_quantized", "quantize"]
