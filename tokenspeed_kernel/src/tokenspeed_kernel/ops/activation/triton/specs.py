"""Triton kernels of the activation ops."""

from __future__ import annotations

from tokenspeed_kernel.ops.activation.contract import FORMATS, GELU_AND_MUL, SILU_AND_MUL, SWIGLU_CLAMPED
from tokenspeed_kernel.spec import TRITON_PORTABLE, Band, KernelSpec, Verified, VerifiedBy

__all__ = ["SPECS"]

_COMPILED = Verified(VerifiedBy.COMPILED, "sm_80, sm_90, sm_100, sm_120, gfx942, gfx950")

SPECS = tuple(
    KernelSpec(
        op=contract.name,
        name=f"triton_{name}",
        solution="triton",
        band=Band.PORTABLE,
        implementation=f"tokenspeed_kernel.ops.activation.triton.{module}:{name}",
        capability=TRITON_PORTABLE,
        formats=FORMATS,
        requires=("triton",),
        graph_safe=True,
        verified=(Verified(VerifiedBy.SILICON, "H200 (sm_90)"), Verified(VerifiedBy.INTERPRETER, "x86-64"), _COMPILED),
    )
    for contract, name, module in (
        (SILU_AND_MUL, "silu_and_mul", "silu_and_mul"),
        (SWIGLU_CLAMPED, "swiglu_clamped", "gated"),
        (GELU_AND_MUL, "gelu_and_mul", "gated"),
    )
)
