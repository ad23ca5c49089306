"""CPU kernels of the norm ops."""

from __future__ import annotations

from tokenspeed_kernel.ops.norm.contract import FLOAT_FORMATS, FUSED_ADD_RMS_NORM, RMS_NORM
from tokenspeed_kernel.spec import CPU, Band, KernelSpec, Verified, VerifiedBy

__all__ = ["SPECS"]

SPECS = tuple(
    KernelSpec(
        op=contract.name,
        name=f"cpu_{function}",
        solution="cpu",
        band=Band.PERFORMANT,
        implementation=f"tokenspeed_kernel.ops.norm.cpu.rms_norm:{function}",
        capability=CPU,
        formats=FLOAT_FORMATS[contract.name],
        verified=(Verified(VerifiedBy.SILICON, "x86-64"),),
    )
    for contract, function in ((RMS_NORM, "rms_norm"), (FUSED_ADD_RMS_NORM, "fused_add_rms_norm"))
)
