"""Products of fp8 operands with block scales, of vendor libraries."""

from __future__ import annotations

from typing import Final

from tokenspeed_kernel.ops.gemm.contract import GROUPED_MM_CONTIGUOUS, GROUPED_MM_MASKED, MM
from tokenspeed_kernel.signature import Signature
from tokenspeed_kernel.spec import Band, Capability, KernelSpec, Library, Verified, VerifiedBy

__all__ = ["BLOCK_FP8_SPECS"]

_OPERANDS: Final = {"x": "fp8_e4m3@block_1x128", "weight": "fp8_e4m3@block_128x128", "out": "bf16"}
_HOPPER: Final = Capability(("sm_90a",))
_INTEGERS: Final = ("int32", "int64")
# Several wheels bring this module; that of the name deep-gemm on the public index lacks its headers.
_DEEP_GEMM: Final = Library("deep_gemm", "tokenspeed-deepgemm")


def _deep_gemm(op: str, formats: tuple[Signature, ...]) -> KernelSpec:
    name = op.partition(".")[2]
    return KernelSpec(
        op=op,
        name=f"deep_gemm_{name}_sm90",
        solution="deep_gemm",
        band=Band.PERFORMANT,
        priority=2,  # 7.6 us at 64 x 4096 x 4096 and 1300 to 1400 TFLOP/s at 4096 rows on an H200
        implementation=f"tokenspeed_kernel.ops.gemm.vendor.deep_gemm:{name}",
        capability=_HOPPER,
        formats=formats,
        requires=(_DEEP_GEMM,),
        verified=(Verified(VerifiedBy.SILICON, "H200 (sm_90)", "tokenspeed-deepgemm 2.5.0"),),
    )


BLOCK_FP8_SPECS: Final = (
    _deep_gemm(MM.name, (Signature.of(**_OPERANDS),)),
    _deep_gemm(
        GROUPED_MM_CONTIGUOUS.name,
        tuple(Signature.of(**_OPERANDS, **{rows: one}) for rows in ("offsets", "expert_ids") for one in _INTEGERS),
    ),
    _deep_gemm(GROUPED_MM_MASKED.name, tuple(Signature.of(**_OPERANDS, masked_m=one) for one in _INTEGERS)),
    KernelSpec(
        op=MM.name,
        name="trtllm_mm_sm90",
        solution="trtllm",
        band=Band.PERFORMANT,
        priority=1,
        implementation="tokenspeed_kernel.ops.gemm.vendor.trtllm:mm",
        capability=_HOPPER,
        formats=(Signature.of(**_OPERANDS),),
        requires=(Library("tensorrt_llm", "tensorrt-llm", ">=1.0"),),
    ),
)
