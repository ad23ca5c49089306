"""Reference kernels of the quantization ops."""

from __future__ import annotations

from tokenspeed_kernel.ops.quantization.contract import DEQUANTIZE, QUANTIZE
from tokenspeed_kernel.spec import ANYWHERE, Band, KernelSpec

__all__ = ["SPECS"]

SPECS = tuple(
    KernelSpec(
        op=contract.name,
        name=f"reference_{function}",
        solution="reference",
        band=Band.REFERENCE,
        implementation=f"tokenspeed_kernel.ops.quantization.reference:{function}",
        capability=ANYWHERE,
    )
    for contract, function in ((DEQUANTIZE, "dequantize"), (QUANTIZE, "quantize"))
)
