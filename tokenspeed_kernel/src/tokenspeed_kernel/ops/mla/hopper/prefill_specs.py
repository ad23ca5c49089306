"""Latent attention over expanded keys for Hopper."""

from __future__ import annotations

from typing import Final

from tokenspeed_kernel.signature import Signature
from tokenspeed_kernel.spec import Band, Capability, KernelSpec, Verified, VerifiedBy
from tokenspeed_kernel.traits import OneOf

__all__ = ["PREFILL_SPECS"]

_BOTH: Final = OneOf(False, True)

PREFILL_SPECS: Final = (
    KernelSpec(
        op="mla.mla_prefill",
        name="gluon_mla_prefill_sm90",
        solution="gluon",
        band=Band.SPECIALIZED,
        implementation="tokenspeed_kernel.ops.mla.hopper.prefill:mla_prefill",
        capability=Capability(("sm_90a",)),
        formats=Signature.same(("q", "k", "v"), ("bf16", "fp16")),
        traits={"head_dim": OneOf(192), "v_head_dim": OneOf(128), "causal": _BOTH, "return_lse": _BOTH},
        requires=("triton",),
        graph_safe=True,
        verified=(
            Verified(VerifiedBy.SILICON, "H200 (sm_90)", "ragged, graphs"),
            Verified(VerifiedBy.COMPILED, "sm_90a", "Triton 3.6 and 3.9: wgmma, bulk copies; with 3.6 none in memory in the loops"),
        ),
    ),
)
