"""Triton kernels of the matrix products."""

from __future__ import annotations

from tokenspeed_kernel.ops.gemm.contract import MM, mm_formats
from tokenspeed_kernel.spec import TRITON_PORTABLE, Band, KernelSpec, Verified, VerifiedBy

__all__ = ["SPECS"]

SPECS = (
    KernelSpec(
        op=MM.name,
        name="triton_mm",
        solution="triton",
        band=Band.PORTABLE,
        implementation="tokenspeed_kernel.ops.gemm.triton.mm:mm",
        capability=TRITON_PORTABLE,
        formats=mm_formats(mixed_bias=True),
        requires=("triton",),
        graph_safe=True,
        verified=(
            Verified(VerifiedBy.SILICON, "H200 (sm_90)"),
            Verified(VerifiedBy.INTERPRETER, "x86-64", "fp32 only"),
            Verified(VerifiedBy.COMPILED, "sm_80, sm_90, sm_100, sm_120, gfx942, gfx950"),
        ),
    ),
)
