"""Rope kernels for the host processor."""

from __future__ import annotations

from typing import Final

from tokenspeed_kernel.signature import Signature
from tokenspeed_kernel.spec import CPU, Band, KernelSpec, Verified, VerifiedBy

SPECS: Final = (
    KernelSpec(
        op="rope.apply_rope",
        name="cpu_apply_rope",
        solution="cpu",
        band=Band.PERFORMANT,
        implementation="tokenspeed_kernel.ops.rope.cpu.apply_rope:apply_rope",
        capability=CPU,
        formats=tuple(Signature.of(q=text, k=text, cos_sin_cache="fp32") for text in ("fp64", "fp32", "bf16", "fp16")),
        verified=(Verified(VerifiedBy.SILICON, "x86-64 AVX2"),),
    ),
    KernelSpec(
        op="rope.multi_axis_cos_sin",
        name="cpu_multi_axis_cos_sin",
        solution="cpu",
        band=Band.PERFORMANT,
        implementation="tokenspeed_kernel.ops.rope.cpu.multi_axis:multi_axis_cos_sin",
        capability=CPU,
        formats=Signature.same(("cos_sin_cache",), ("fp32",)),
        verified=(Verified(VerifiedBy.SILICON, "x86-64 AVX2"),),
    ),
)
