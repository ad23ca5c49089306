"""Triton kernels of the quantization ops."""

from __future__ import annotations

from tokenspeed_kernel.ops.quantization.contract import DEQUANTIZE, DEQUANTIZE_FORMATS
from tokenspeed_kernel.spec import TRITON_PORTABLE, Band, KernelSpec, Verified, VerifiedBy

__all__ = ["SPECS"]

SPECS = (
    KernelSpec(
        op=DEQUANTIZE.name,
        name="triton_dequantize",
        solution="triton",
        band=Band.PORTABLE,
        implementation="tokenspeed_kernel.ops.quantization.triton.dequantize:dequantize",
        capability=TRITON_PORTABLE,
        formats=DEQUANTIZE_FORMATS,
        requires=("triton",),
        graph_safe=True,
        verified=(Verified(VerifiedBy.INTERPRETER, "x86-64"),),
    ),
)
