"""Scaled number formats: to and from plain tensors, and from what checkpoints have."""

from tokenspeed_kernel.ops.quantization.checkpoints import (
    int4_from_awq,
    int4_from_gptq,
    int4_from_packed_int32,
    mxfp4_from_blocks,
    nvfp4_from_divisor,
)
from tokenspeed_kernel.ops.quantization.dequantize import dequantize
from tokenspeed_kernel.ops.quantization.quantize import empty_quantized, quantize

__all__ = [
    "dequantize",
    "empty_quantized",
    "int4_from_awq",
    "int4_from_gptq",
    "int4_from_packed_int32",
    "mxfp4_from_blocks",
    "nvfp4_from_divisor",
    "quantize",
]
