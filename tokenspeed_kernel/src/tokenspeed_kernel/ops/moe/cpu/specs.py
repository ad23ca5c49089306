"""CPU kernels of the mixture-of-experts ops."""

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
from tokenspeed_kernel.signature import GGUF_BLOCKS, Signature
from tokenspeed_kernel.spec import CPU, Band, KernelSpec, Verified, VerifiedBy

__all__ = ["SPECS"]

_GGUF = tuple(f"{name}@inline" for name in GGUF_BLOCKS)
_VERIFIED = (Verified(VerifiedBy.SILICON, "x86-64"),)

SPECS = (
    KernelSpec(
        op=TOPK_ROUTING.name,
        name="cpu_topk_routing",
        solution="cpu",
        band=Band.PERFORMANT,
        implementation="tokenspeed_kernel.ops.moe.cpu.routing:topk_routing",
        capability=CPU,
        formats=routing_formats(),
        traits=ALL_ROUTING_OPTIONS,
        verified=_VERIFIED,
    ),
    KernelSpec(
        op=PERMUTE.name,
        name="cpu_permute",
        solution="cpu",
        band=Band.PERFORMANT,
        implementation="tokenspeed_kernel.ops.moe.cpu.permute:permute",
        capability=CPU,
        formats=Signature.product(x=PLAIN),
        verified=_VERIFIED,
    ),
    KernelSpec(
        op=UNPERMUTE.name,
        name="cpu_unpermute",
        solution="cpu",
        band=Band.PERFORMANT,
        implementation="tokenspeed_kernel.ops.moe.cpu.permute:unpermute",
        capability=CPU,
        formats=Signature.same(("rows", "addend"), PLAIN),
        verified=_VERIFIED,
    ),
    KernelSpec(
        op=FUSED_EXPERTS.name,
        name="cpu_fused_experts",
        solution="cpu",
        band=Band.PERFORMANT,
        implementation="tokenspeed_kernel.ops.moe.cpu.experts:fused_experts",
        capability=CPU,
        # The products are those of `gemm.mm`, which takes all of these on the CPU.
        formats=expert_formats((*WEIGHT_FORMATS, *_GGUF)),
        traits=ALL_EXPERT_OPTIONS,
        verified=_VERIFIED,
    ),
)
