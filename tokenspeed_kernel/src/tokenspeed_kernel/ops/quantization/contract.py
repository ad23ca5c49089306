"""What the quantization ops promise.

Dequantizing gives each number exactly as the format defines it, rounded once to float32 and from there to another dtype. Quantizing
follows `docs/contracts/quantization.md` operation by operation in IEEE float32, rounding to nearest with ties to even. Each kernel
agrees with the reference bit for bit, in both directions.
"""

from __future__ import annotations

from tokenspeed_kernel.signature import GGUF_BLOCKS, Format, Signature
from tokenspeed_kernel.spec import OpContract

__all__ = ["CONTRACTS", "DEQUANTIZE", "DEQUANTIZE_FORMATS", "QUANTIZE", "QUANTIZE_FORMATS"]

DEQUANTIZE = OpContract(
    name="quantization.dequantize",
    operands=("tensor", "out"),
    parameters=("tensor", "out", "out_dtype"),
    summary="the numbers of a quantized tensor",
)
QUANTIZE = OpContract(
    name="quantization.quantize",
    operands=("x", "out"),
    parameters=("x", "format", "scale", "global_scale", "out"),
    summary="a tensor in a scaled format, with scales computed or given",
)
CONTRACTS = (DEQUANTIZE, QUANTIZE)

_FNUZ = ("fp8_e4m3fnuz", "fp8_e5m2fnuz")
DEQUANTIZE_FORMATS = tuple(
    Signature.of(tensor=fmt, out=out)
    for fmt in Format.scaled()
    if fmt.logical not in _FNUZ
    for out in ("fp32", "bf16", "fp16")
)
"""Formats that the CPU and Triton kernels take."""
QUANTIZE_FORMATS = tuple(
    Signature.of(x=x, out=fmt)
    for fmt in Format.scaled()
    if fmt.logical not in (*_FNUZ, *GGUF_BLOCKS)
    for x in ("fp32", "bf16", "fp16")
)
"""Formats that `quantize` gives."""
