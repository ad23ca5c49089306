"""Attention kernels of vendor libraries."""

from __future__ import annotations

from typing import Final

from tokenspeed_kernel.signature import Signature
from tokenspeed_kernel.spec import Band, Capability, KernelSpec, Library, Verified, VerifiedBy
from tokenspeed_kernel.traits import OneOf

__all__ = ["SPECS"]

_BOTH: Final = OneOf(False, True)


def _spec(
    op: str, operands: tuple[str, ...], band: Band, priority: int, options: dict[str, OneOf], *verified: Verified
) -> KernelSpec:
    return KernelSpec(
        op=f"attention.{op}",
        name=f"flashinfer_{op}",
        solution="flashinfer",
        band=band,
        priority=priority,
        implementation=f"tokenspeed_kernel.ops.attention.vendor.flashinfer_mha:{op}",
        capability=Capability(("nvidia>=sm_80",)),
        formats=Signature.same(operands, ("bf16", "fp16")),
        # The LSE of its portable kernels sums weights rounded to half precision: off by 7e-4, it is none to merge by.
        traits={"head_dim": OneOf(64, 128, 256), "logit_cap": _BOTH, "return_lse": OneOf(False), **options},
        requires=(Library("flashinfer", "flashinfer-python", ">=0.7.2"),),
        # It plans on the host, which waits for the device.
        graph_safe=False,
        verified=verified,
    )


_H200: Final = Verified(VerifiedBy.SILICON, "H200 (sm_90)", "flashinfer-python 0.7.2.post1, bf16")
SPECS: Final = (
    # Prefill is where it is ahead: 646 TFLOP/s at 8 x 4096 on an H200. At decoding the portable kernel is (594 us against 740 at
    # 64 x 8192 keys), and does not stop for a plan: there it is chosen by name alone.
    _spec("mha_prefill", ("q", "k", "v"), Band.PERFORMANT, 0, {"causal": _BOTH}, _H200),
    _spec("mha_extend", ("q", "k_cache", "v_cache"), Band.PERFORMANT, 0, {"causal": _BOTH}, _H200),
    _spec("mha_decode", ("q", "k_cache", "v_cache"), Band.PORTABLE, -1, {}, _H200),
    # 600 TFLOP/s at 8 x 4096 on an H200, but a call for each length in the batch, and the host waits for the lengths at each layer:
    # chosen by name alone.
    KernelSpec(
        op="attention.mha_prefill",
        name="cudnn_mha_prefill",
        solution="cudnn",
        band=Band.PORTABLE,
        priority=-1,
        implementation="tokenspeed_kernel.ops.attention.vendor.cudnn_mha:mha_prefill",
        capability=Capability(("nvidia>=sm_80",)),
        formats=Signature.same(("q", "k", "v"), ("bf16", "fp16")),
        traits={"head_dim": OneOf(64, 128), "causal": _BOTH, "return_lse": _BOTH},
        graph_safe=False,
        verified=(Verified(VerifiedBy.SILICON, "H200 (sm_90)"),),
    ),
)
