"""Attention kernels for Hopper."""

from __future__ import annotations

from typing import Final

from tokenspeed_kernel.signature import Signature
from tokenspeed_kernel.spec import Band, Capability, KernelSpec, Verified, VerifiedBy
from tokenspeed_kernel.traits import Multiple, OneOf

__all__ = ["SPECS"]

_BOTH: Final = OneOf(False, True)

SPECS: Final = (
    KernelSpec(
        op="attention.mha_decode",
        name="hopper_mha_decode",
        solution="hopper",
        band=Band.PORTABLE,
        priority=-2,
        implementation="tokenspeed_kernel.ops.attention.hopper.decode:mha_decode",
        # Tile shapes, stages and the number of programs are those of this chip's shared memory and multiprocessors.
        capability=Capability(("sm_90a",), interpreter=True),
        formats=Signature.same(("q", "k_cache", "v_cache"), ("bf16", "fp16")),
        # The 16 keys of a lane lie in one page.
        traits={
            "head_dim": OneOf(64, 128),
            "page_size": Multiple(16),
            **dict.fromkeys(("sliding_window", "logit_cap", "sinks", "return_lse"), _BOTH),
        },
        requires=("triton",),
        graph_safe=True,
        verified=(
            Verified(VerifiedBy.INTERPRETER, "x86-64"),
            Verified(VerifiedBy.COMPILED, "sm_90a", "Triton 3.6 and 3.9: mma.sync, cp.async, no register in memory"),
        ),
    ),
)
