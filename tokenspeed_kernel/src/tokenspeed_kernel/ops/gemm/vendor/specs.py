"""Matrix products of vendor libraries: cuBLAS, through PyTorch, and those with block scales."""

from __future__ import annotations

from tokenspeed_kernel.ops.gemm.contract import MM, mm_formats
from tokenspeed_kernel.ops.gemm.vendor.block_fp8_specs import BLOCK_FP8_SPECS
from tokenspeed_kernel.spec import Band, Capability, KernelSpec, Verified, VerifiedBy

__all__ = ["SPECS"]

SPECS = (
    KernelSpec(
        op=MM.name,
        name="cublas_mm",
        solution="cublas",
        band=Band.PERFORMANT,
        implementation="tokenspeed_kernel.ops.gemm.vendor.cublas_mm:mm",
        capability=Capability(("nvidia",)),
        formats=mm_formats(mixed_bias=False),
        graph_safe=True,
        verified=(Verified(VerifiedBy.SILICON, "H200 (sm_90)"),),
    ),
    *BLOCK_FP8_SPECS,
)
