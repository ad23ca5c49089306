"""Norms of vendor libraries."""

from __future__ import annotations

from tokenspeed_kernel.ops.norm.contract import FUSED_ADD_RMS_NORM, RMS_NORM
from tokenspeed_kernel.signature import Signature
from tokenspeed_kernel.spec import Band, Capability, KernelSpec, Library, Verified, VerifiedBy

__all__ = ["SPECS"]

_FORMATS = ("bf16", "fp16")

SPECS = tuple(
    KernelSpec(
        op=contract.name,
        name=f"flashinfer_{function}",
        solution="flashinfer",
        # Behind the portable kernel, which takes 1.6 us where this one takes 2.3 (3.1 with the residual), on an H200.
        band=Band.PORTABLE,
        priority=-1,
        implementation=f"tokenspeed_kernel.ops.norm.vendor.flashinfer_norm:{function}",
        capability=Capability(("nvidia>=sm_80",)),
        formats=Signature.same(contract.operands, _FORMATS),
        requires=(Library("flashinfer", "flashinfer-python", ">=0.7.2"),),
        graph_safe=True,
        verified=(Verified(VerifiedBy.SILICON, "H200 (sm_90)", "flashinfer-python 0.7.2.post1"),),
    )
    for contract, function in ((RMS_NORM, "rms_norm"), (FUSED_ADD_RMS_NORM, "fused_add_rms_norm"))
)
