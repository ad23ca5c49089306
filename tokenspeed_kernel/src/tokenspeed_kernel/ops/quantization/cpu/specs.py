"""CPU kernels of the quantization ops."""

from __future__ import annotations

from tokenspeed_kernel.ops.quantization.contract import DEQUANTIZE, DEQUANTIZE_FORMATS
from tokenspeed_kernel.spec import CPU, Band, KernelSpec, Verified, VerifiedBy

__all__ = ["SPECS"]

SPECS = (
    KernelSpec(
        op=DEQUANTIZE.name,
        name="cpu_dequantize",
        solution="cpu",
        band=Band.PERFORMANT,
        implementation="tokenspeed_kernel.ops.quantization.cpu.decode:dequantize",
        capability=CPU,
        formats=DEQUANTIZE_FORMATS,
        verified=(Verified(VerifiedBy.SILICON, "x86-64"),),
    ),
)
