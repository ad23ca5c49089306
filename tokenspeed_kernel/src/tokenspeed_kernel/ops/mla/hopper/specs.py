"""Latent attention kernels for Hopper."""

from __future__ import annotations

from typing import Final

from tokenspeed_kernel.signature import Signature
from tokenspeed_kernel.spec import Band, Capability, KernelSpec, Verified, VerifiedBy
from tokenspeed_kernel.traits import OneOf

__all__ = ["SPECS"]

_BOTH: Final = OneOf(False, True)

SPECS: Final = (
    KernelSpec(
        op="mla.mla_decode",
        name="gluon_mla_decode_sm90",
        solution="gluon",
        # Ahead of all others at one request, behind some at others (perf/baselines/h200/hopper.mla_decode.txt), and no trait tells
        # how many requests a call has: by name until one does.
        band=Band.PORTABLE,
        priority=-2,
        implementation="tokenspeed_kernel.ops.mla.hopper.decode:mla_decode",
        capability=Capability(("sm_90a",)),
        formats=Signature.same(("q", "kv_cache"), ("bf16",)),
        traits={
            "latent_dim": OneOf(512),
            "rope_dim": OneOf(64),
            "page_size": OneOf(64),
            "causal": _BOTH,
            "return_lse": _BOTH,
        },
        requires=("triton",),
        graph_safe=True,
        verified=(
            Verified(VerifiedBy.SILICON, "H200 (sm_90)", "ragged batches, Triton 3.6; not yet a graph with other lengths"),
            Verified(VerifiedBy.COMPILED, "sm_90a", "Triton 3.6 and 3.9: wgmma, bulk copies; nothing stored to memory in the loop"),
        ),
    ),
)
