"""CPU kernels of the activation ops."""

from __future__ import annotations

from tokenspeed_kernel.ops.activation.contract import FORMATS, SILU_AND_MUL
from tokenspeed_kernel.spec import CPU, Band, KernelSpec, Verified, VerifiedBy

__all__ = ["SPECS"]

SPECS = (
    KernelSpec(
        op=SILU_AND_MUL.name,
        name="cpu_silu_and_mul",
        solution="cpu",
        band=Band.PERFORMANT,
        implementation="tokenspeed_kernel.ops.activation.cpu.silu_and_mul:silu_and_mul",
        capability=CPU,
        formats=FORMATS,
        verified=(Verified(VerifiedBy.SILICON, "x86-64"),),
    ),
)
