"""Reference kernels of the embedding ops."""

from __future__ import annotations

from tokenspeed_kernel.ops.embedding.contract import EMBEDDING
from tokenspeed_kernel.spec import ANYWHERE, Band, KernelSpec

__all__ = ["SPECS"]

SPECS = (
    KernelSpec(
        op=EMBEDDING.name,
        name="reference_embedding",
        solution="reference",
        band=Band.REFERENCE,
        implementation="tokenspeed_kernel.ops.embedding.reference:embedding",
        capability=ANYWHERE,
    ),
)
