"""CPU kernels of the quantization ops."""

from __future__ import annotations

from tokenspeed_kernel.ops.quantization.contract import DEQUANTIZE, DEQUANTIZE_FORMATS, QUANTIZE, QUANTIZE_FORMATS
from tokenspeed_kernel.spec import CPU, Band, KernelSpec, Verified, VerifiedBy

__all__ = ["SPECS"]

SPECS = tuple(
    KernelSpec(
        op=contract.name,
        name=f"cpu_{function}",
        solution="cpu",
        band=Band.PERFORMANT,
        implementation=f"tokenspeed_kernel.ops.quantization.cpu.{module}:{function}",
        capability=CPU,
        formats=formats,
        verified=(Verified(VerifiedBy.SILICON, "x86-64"),),
    )
    for contract, module, function, formats in (
        (DEQUANTIZE, "decode", "dequantize", DEQUANTIZE_FORMATS),
        (QUANTIZE, "encode", "quantize", QUANTIZE_FORMATS),
    )
)
