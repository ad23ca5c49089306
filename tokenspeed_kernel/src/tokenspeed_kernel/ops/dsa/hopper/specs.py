"""Sparse attention kernels for Hopper."""

from __future__ import annotations

from typing import Final

from tokenspeed_kernel.signature import Signature
from tokenspeed_kernel.spec import Band, Capability, KernelSpec, Verified, VerifiedBy
from tokenspeed_kernel.traits import OneOf

__all__ = ["SPECS"]


def _sparse(op: str) -> KernelSpec:
    return KernelSpec(
        op=f"dsa.{op}",
        name=f"gluon_{op}_sm90",
        solution="gluon",
        band=Band.SPECIALIZED,
        implementation=f"tokenspeed_kernel.ops.dsa.hopper.sparse:{op}",
        capability=Capability(("sm_90a",)),
        formats=Signature.same(("q", "kv_cache"), ("bf16",)),
        traits={"latent_dim": OneOf(512), "rope_dim": OneOf(64), "return_lse": OneOf(False, True)},
        requires=("triton",),
        graph_safe=True,
        verified=(
            Verified(VerifiedBy.SILICON, "H200 (sm_90)", "Triton 3.6; fewer than 32 heads go to the portable kernel"),
            Verified(VerifiedBy.COMPILED, "sm_90a", "Triton 3.6 and 3.9: wgmma, copies of 16 bytes, three roles of warps"),
        ),
    )


# Measured on an H200: 1.7 to 4.2 times the portable kernel, 0.70 to 1.27 of FlashMLA (perf/baselines/h200/hopper.dsa.txt).
SPECS: Final = (_sparse("sparse_decode"), _sparse("sparse_prefill"))
