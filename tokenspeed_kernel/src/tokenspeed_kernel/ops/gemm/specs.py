"""Reference kernels of the matrix products."""

from __future__ import annotations

from tokenspeed_kernel.ops.gemm.contract import MM
from tokenspeed_kernel.spec import ANYWHERE, Band, KernelSpec

__all__ = ["SPECS"]

SPECS = (
    KernelSpec(
        op=MM.name,
        name="reference_mm",
        solution="reference",
        band=Band.REFERENCE,
        implementation="tokenspeed_kernel.ops.gemm.reference:mm",
        capability=ANYWHERE,
    ),
)
