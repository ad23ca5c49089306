"""CPU kernels of the activation ops."""

from __future__ import annotations

from tokenspeed_kernel.ops.activation.contract import FORMATS, GELU_AND_MUL, SILU_AND_MUL, SWIGLU_CLAMPED
from tokenspeed_kernel.spec import CPU, Band, KernelSpec, Verified, VerifiedBy

__all__ = ["SPECS"]

SPECS = tuple(
    KernelSpec(
        op=contract.name,
        name=f"cpu_{name}",
        solution="cpu",
        band=Band.PERFORMANT,
        implementation=f"tokenspeed_kernel.ops.activation.cpu.{module}:{name}",
        capability=CPU,
        formats=FORMATS,
        verified=(Verified(VerifiedBy.SILICON, "x86-64"),),
    )
    for contract, name, module in (
        (SILU_AND_MUL, "silu_and_mul", "silu_and_mul"),
        (SWIGLU_CLAMPED, "swiglu_clamped", "gated"),
        (GELU_AND_MUL, "gelu_and_mul", "gated"),
    )
)
