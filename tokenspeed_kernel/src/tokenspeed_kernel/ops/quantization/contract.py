"""What the quantization ops promise.

Dequantizing gives each number exactly as the format defines it, rounded once to float32 and from there to another dtype. Each
kernel agrees with the reference bit for bit.
"""

from __future__ import annotations

from tokenspeed_kernel.signature import Format, Signature
from tokenspeed_kernel.spec import OpContract

__all__ = ["CONTRACTS", "DEQUANTIZE", "DEQUANTIZE_FORMATS"]

DEQUANTIZE = OpContract(
    name="quantization.dequantize",
    operands=("tensor", "out"),
    parameters=("tensor", "out", "out_dtype"),
    summary="the numbers of a quantized tensor",
)
CONTRACTS = (DEQUANTIZE,)

_FNUZ = ("fp8_e4m3fnuz", "fp8_e5m2fnuz")
DEQUANTIZE_FORMATS = tuple(
    Signature.of(tensor=fmt, out=out)
    for fmt in Format.scaled()
    if fmt.logical not in _FNUZ
    for out in ("fp32", "bf16", "fp16")
)
"""Formats that the CPU and Triton kernels take."""
