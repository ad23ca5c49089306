"""CPU kernels of the norm ops."""

from __future__ import annotations

from tokenspeed_kernel.ops.norm.contract import CONTRACTS, FLOAT_FORMATS, FUSED_ADD_RMS_NORM, RMS_NORM
from tokenspeed_kernel.spec import CPU, Band, KernelSpec, Verified, VerifiedBy

__all__ = ["SPECS"]

_MODULES = {RMS_NORM.name: "rms_norm", FUSED_ADD_RMS_NORM.name: "rms_norm"}

SPECS = tuple(
    KernelSpec(
        op=contract.name,
        name=f"cpu_{contract.name.partition('.')[2]}",
        solution="cpu",
        band=Band.PERFORMANT,
        implementation=(
            f"tokenspeed_kernel.ops.norm.cpu.{_MODULES.get(contract.name, 'variants')}:{contract.name.partition('.')[2]}"
        ),
        capability=CPU,
        formats=FLOAT_FORMATS[contract.name],
        verified=(Verified(VerifiedBy.SILICON, "x86-64"),),
    )
    for contract in CONTRACTS
)
