"""Triton kernels of the embedding ops."""

from __future__ import annotations

from tokenspeed_kernel.ops.embedding.contract import EMBEDDING, FORMATS, SCALED_FORMATS
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
    KernelSpec(
        op=EMBEDDING.name,
        name="triton_embedding_scaled",
        solution="triton",
        band=Band.PORTABLE,
        implementation="tokenspeed_kernel.ops.embedding.triton.embedding:embedding_scaled",
        capability=TRITON_PORTABLE,
        formats=SCALED_FORMATS,
        requires=("triton",),
        # Of another priority than triton_embedding, with which it shares no format: so nothing has to be compared.
        priority=5,
        graph_safe=True,
        verified=(Verified(VerifiedBy.SILICON, "H200 (sm_90)"), Verified(VerifiedBy.INTERPRETER, "x86-64")),
    ),
)
