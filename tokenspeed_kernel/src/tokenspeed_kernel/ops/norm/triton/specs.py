"""Triton kernels of the norm ops."""

from __future__ import annotations

from tokenspeed_kernel.ops.norm.contract import FLOAT_FORMATS, FUSED_ADD_RMS_NORM, RMS_NORM
from tokenspeed_kernel.spec import TRITON_PORTABLE, Band, KernelSpec, Verified, VerifiedBy

__all__ = ["SPECS"]

SPECS = tuple(
    KernelSpec(
        op=contract.name,
        name=f"triton_{function}",
        solution="triton",
        band=Band.PORTABLE,
        implementation=f"tokenspeed_kernel.ops.norm.triton.rms_norm:{function}",
        capability=TRITON_PORTABLE,
        formats=FLOAT_FORMATS[contract.name],
        requires=("triton",),
        graph_safe=True,
        verified=(
            Verified(VerifiedBy.SILICON, "H200 (sm_90)"),
            Verified(VerifiedBy.INTERPRETER, "x86-64"),
            Verified(VerifiedBy.COMPILED, "sm_80, sm_90, sm_100, sm_120, gfx942, gfx950"),
        ),
    )
    for contract, function in ((RMS_NORM, "rms_norm"), (FUSED_ADD_RMS_NORM, "fused_add_rms_norm"))
)
