"""Prefill kernels for Hopper."""

from __future__ import annotations

from typing import Final

from tokenspeed_kernel.signature import Signature
from tokenspeed_kernel.spec import Band, Capability, KernelSpec, Verified, VerifiedBy
from tokenspeed_kernel.traits import Constraint, OneOf, PowerOfTwo

__all__ = ["PREFILL_SPECS"]

_BOTH: Final = OneOf(False, True)


def _prefill(op: str, operands: tuple[str, ...], **sizes: Constraint) -> KernelSpec:
    return KernelSpec(
        op=f"attention.{op}",
        name=f"gluon_{op}_sm90",
        solution="gluon",
        band=Band.SPECIALIZED,
        implementation=f"tokenspeed_kernel.ops.attention.hopper.prefill:{op}",
        capability=Capability(("sm_90a",)),
        formats=Signature.same(operands, ("bf16", "fp16")),
        traits={
            "head_dim": OneOf(64, 128),
            **sizes,
            **dict.fromkeys(("causal", "sliding_window", "logit_cap", "sinks", "return_lse"), _BOTH),
        },
        requires=("triton",),
        graph_safe=True,
        verified=(
            Verified(VerifiedBy.SILICON, "H200 (sm_90)", "ragged, paged, missing pages, graphs; options in an earlier form"),
            Verified(VerifiedBy.COMPILED, "sm_90a", "Triton 3.6 and 3.9: wgmma, bulk copies; with 3.6 none in memory in the loops"),
        ),
    )


PREFILL_SPECS: Final = (
    _prefill("mha_prefill", ("q", "k", "v")),
    # The copy engine brings a page, or a tile of 128 keys, at once.
    _prefill("mha_extend", ("q", "k_cache", "v_cache"), page_size=PowerOfTwo(16, 4096)),
)
