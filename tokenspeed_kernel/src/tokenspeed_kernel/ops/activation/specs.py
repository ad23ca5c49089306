"""Reference kernels of the activation ops."""

from __future__ import annotations

from tokenspeed_kernel.ops.activation.contract import SILU_AND_MUL
from tokenspeed_kernel.spec import ANYWHERE, Band, KernelSpec

__all__ = ["SPECS"]

SPECS = (
    KernelSpec(
        op=SILU_AND_MUL.name,
        name="reference_silu_and_mul",
        solution="reference",
        band=Band.REFERENCE,
        implementation="tokenspeed_kernel.ops.activation.reference:silu_and_mul",
        capability=ANYWHERE,
    ),
)
