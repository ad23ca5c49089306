"""Triton kernels of the quantization ops."""

from __future__ import annotations

from tokenspeed_kernel.ops.quantization.contract import DEQUANTIZE, DEQUANTIZE_FORMATS, QUANTIZE, QUANTIZE_FORMATS
from tokenspeed_kernel.spec import TRITON_PORTABLE, Band, KernelSpec, Verified, VerifiedBy

__all__ = ["SPECS"]

SPECS = tuple(
    KernelSpec(
        op=contract.name,
        name=f"triton_{function}",
        solution="triton",
        band=Band.PORTABLE,
        implementation=f"tokenspeed_kernel.ops.quantization.triton.{function}:{function}",
        capability=TRITON_PORTABLE,
        formats=formats,
        requires=("triton",),
        graph_safe=True,
        verified=(Verified(VerifiedBy.SILICON, "H200 (sm_90)"), Verified(VerifiedBy.INTERPRETER, "x86-64")),
    )
    for contract, function, formats in (
        (DEQUANTIZE, "dequantize", DEQUANTIZE_FORMATS),
        (QUANTIZE, "quantize", QUANTIZE_FORMATS),
    )
)
