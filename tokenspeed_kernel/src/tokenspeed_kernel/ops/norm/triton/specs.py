"""Triton kernels of the norm ops."""

from __future__ import annotations

from tokenspeed_kernel.ops.norm.contract import CONTRACTS, FLOAT_FORMATS, FUSED_ADD_RMS_NORM, RMS_NORM
from tokenspeed_kernel.spec import TRITON_PORTABLE, Band, KernelSpec, Verified, VerifiedBy

__all__ = ["SPECS"]

_MODULES = {RMS_NORM.name: "rms_norm", FUSED_ADD_RMS_NORM.name: "rms_norm"}
_VERIFIED = (
    Verified(VerifiedBy.SILICON, "H200 (sm_90)"),
    Verified(VerifiedBy.INTERPRETER, "x86-64"),
    Verified(VerifiedBy.COMPILED, "sm_80, sm_90, sm_100, sm_120, gfx942, gfx950"),
)

SPECS = tuple(
    KernelSpec(
        op=contract.name,
        name=f"triton_{contract.name.partition('.')[2]}",
        solution="triton",
        band=Band.PORTABLE,
        implementation=(
            f"tokenspeed_kernel.ops.norm.triton.{_MODULES.get(contract.name, 'rows')}:{contract.name.partition('.')[2]}"
        ),
        capability=TRITON_PORTABLE,
        formats=FLOAT_FORMATS[contract.name],
        requires=("triton",),
        graph_safe=True,
        verified=_VERIFIED,
    )
    for contract in CONTRACTS
)
