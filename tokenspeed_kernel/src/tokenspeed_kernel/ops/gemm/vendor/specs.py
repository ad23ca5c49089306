"""Matrix products of vendor libraries: cuBLAS, through PyTorch, and those with block scales."""

from __future__ import annotations

from tokenspeed_kernel.ops.gemm.contract import BMM, MM, grouped_formats, mm_formats
from tokenspeed_kernel.ops.gemm.vendor.block_fp8_specs import BLOCK_FP8_SPECS
from tokenspeed_kernel.signature import Signature
from tokenspeed_kernel.spec import Band, Capability, KernelSpec, Verified, VerifiedBy

__all__ = ["SPECS"]

_TENSOR = "fp8_e4m3@tensor"

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
    KernelSpec(
        op=MM.name,
        name="cublas_mm_fp8",
        solution="cublas",
        band=Band.PERFORMANT,
        implementation="tokenspeed_kernel.ops.gemm.vendor.cublas_fp8:mm",
        capability=Capability(("nvidia>=sm_89",)),
        # The library takes no bias of another dtype than the result, and none beside a float32 one.
        formats=(
            *(Signature.of(x=_TENSOR, weight=_TENSOR, bias=out, out=out) for out in ("bf16", "fp16")),
            Signature.of(x=_TENSOR, weight=_TENSOR, out="fp32"),
            Signature.of(x="fp8_e4m3@token", weight="fp8_e4m3@channel", bias="bf16", out="bf16"),
        ),
        priority=5,
        graph_safe=True,
        verified=(Verified(VerifiedBy.SILICON, "H200 (sm_90)"),),
    ),
    KernelSpec(
        op=BMM.name,
        name="cublas_bmm",
        solution="cublas",
        band=Band.PERFORMANT,
        implementation="tokenspeed_kernel.ops.gemm.vendor.cublas_bmm:bmm",
        capability=Capability(("nvidia",)),
        formats=grouped_formats(scaled=False),
        graph_safe=True,
        verified=(Verified(VerifiedBy.SILICON, "H200 (sm_90)"),),
    ),
)
