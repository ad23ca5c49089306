"""CPU kernels of the embedding ops."""

from __future__ import annotations

from tokenspeed_kernel.ops.embedding.contract import EMBEDDING, FORMATS, SCALED_FORMATS
from tokenspeed_kernel.spec import CPU, Band, KernelSpec, Verified, VerifiedBy

__all__ = ["SPECS"]

SPECS = (
    KernelSpec(
        op=EMBEDDING.name,
        name="cpu_embedding",
        solution="cpu",
        band=Band.PERFORMANT,
        implementation="tokenspeed_kernel.ops.embedding.cpu.embedding:embedding",
        capability=CPU,
        formats=FORMATS,
        verified=(Verified(VerifiedBy.SILICON, "x86-64"),),
    ),
    KernelSpec(
        op=EMBEDDING.name,
        name="cpu_embedding_scaled",
        solution="cpu",
        band=Band.PERFORMANT,
        implementation="tokenspeed_kernel.ops.embedding.cpu.embedding:embedding_scaled",
        capability=CPU,
        formats=SCALED_FORMATS,
        priority=5,
        verified=(Verified(VerifiedBy.SILICON, "x86-64"),),
    ),
)
