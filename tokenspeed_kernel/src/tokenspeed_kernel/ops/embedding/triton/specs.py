"""Triton kernels of the embedding ops."""

from __future__ import annotations

from tokenspeed_kernel.ops.embedding.contract import EMBEDDING, FORMATS
from tokenspeed_kernel.spec import TRITON_PORTABLE, Band, KernelSpec, Verified, VerifiedBy

__all__ = ["SPECS"]

SPECS = (
    KernelSpec(
        op=EMBEDDING.name,
        name="triton_embedding",
        solution="triton",
        band=Band.PORTABLE,
        implementation="tokenspeed_kernel.ops.embedding.triton.embedding:embedding",
        capability=TRITON_PORTABLE,
        formats=FORMATS,
        requires=("triton",),
        graph_safe=True,
        verified=(
            Verified(VerifiedBy.SILICON, "H200 (sm_90)"),
            Verified(VerifiedBy.INTERPRETER, "x86-64"),
            Verified(VerifiedBy.COMPILED, "sm_80, sm_90, sm_100, sm_120, gfx942, gfx950"),
        ),
    ),
)
