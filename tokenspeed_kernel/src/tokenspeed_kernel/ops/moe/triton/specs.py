"""Triton kernels of the mixture-of-experts ops."""

from __future__ import annotations

from tokenspeed_kernel.ops.moe.contract import (
    ALL_EXPERT_OPTIONS,
    ALL_ROUTING_OPTIONS,
    FUSED_EXPERTS,
    PERMUTE,
    PLAIN,
    TOPK_ROUTING,
    UNPERMUTE,
    WEIGHT_FORMATS,
    expert_formats,
    routing_formats,
)
from tokenspeed_kernel.signature import Signature
from tokenspeed_kernel.spec import TRITON_PORTABLE, Band, KernelSpec, Verified, VerifiedBy
from tokenspeed_kernel.traits import Range

__all__ = ["SPECS"]

_COMPILED = Verified(VerifiedBy.COMPILED, "sm_80, sm_90, sm_100, sm_120, gfx942, gfx950")
_SILICON = Verified(VerifiedBy.SILICON, "H200 (sm_90)")
_VERIFIED = (_SILICON, Verified(VerifiedBy.INTERPRETER, "x86-64"), _COMPILED)

SPECS = (
    KernelSpec(
        op=TOPK_ROUTING.name,
        name="triton_topk_routing",
        solution="triton",
        band=Band.PORTABLE,
        implementation="tokenspeed_kernel.ops.moe.triton.routing:topk_routing",
        capability=TRITON_PORTABLE,
        formats=routing_formats(),
        # All logits of a token lie in registers, and the choice of each slot is unrolled.
        traits={**ALL_ROUTING_OPTIONS, "num_experts": Range(1, 4096), "top_k": Range(1, 64)},
        requires=("triton",),
        graph_safe=True,
        verified=_VERIFIED,
    ),
    KernelSpec(
        op=PERMUTE.name,
        name="triton_permute",
        solution="triton",
        band=Band.PORTABLE,
        implementation="tokenspeed_kernel.ops.moe.triton.permute:permute",
        capability=TRITON_PORTABLE,
        formats=Signature.product(x=PLAIN),
        requires=("triton",),
        graph_safe=True,
        verified=_VERIFIED,
    ),
    KernelSpec(
        op=UNPERMUTE.name,
        name="triton_unpermute",
        solution="triton",
        band=Band.PORTABLE,
        implementation="tokenspeed_kernel.ops.moe.triton.permute:unpermute",
        capability=TRITON_PORTABLE,
        formats=Signature.same(("rows", "addend"), PLAIN),
        requires=("triton",),
        graph_safe=True,
        verified=_VERIFIED,
    ),
    KernelSpec(
        op=FUSED_EXPERTS.name,
        name="triton_fused_experts",
        solution="triton",
        band=Band.PORTABLE,
        implementation="tokenspeed_kernel.ops.moe.triton.experts:fused_experts",
        capability=TRITON_PORTABLE,
        formats=expert_formats(WEIGHT_FORMATS),
        traits={**ALL_EXPERT_OPTIONS, "num_experts": Range(1, 4096)},
        requires=("triton",),
        graph_safe=True,
        verified=(
            Verified(VerifiedBy.SILICON, "H200 (sm_90)", "rows as they are; not those in fp8"),
            Verified(VerifiedBy.INTERPRETER, "x86-64"),
            _COMPILED,
        ),
    ),
)
