"""Reference kernels of the norm ops."""

from __future__ import annotations

from tokenspeed_kernel.ops.norm.contract import FUSED_ADD_RMS_NORM, RMS_NORM
from tokenspeed_kernel.spec import ANYWHERE, Band, KernelSpec

__all__ = ["SPECS"]

SPECS = tuple(
    KernelSpec(
        op=contract.name,
        name=f"reference_{function}",
        solution="reference",
        band=Band.REFERENCE,
        implementation=f"tokenspeed_kernel.ops.norm.reference:{function}",
        capability=ANYWHERE,
    )
    for contract, function in ((RMS_NORM, "rms_norm"), (FUSED_ADD_RMS_NORM, "fused_add_rms_norm"))
)
