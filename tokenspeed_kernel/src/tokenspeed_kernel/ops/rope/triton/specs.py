"""Triton kernels of the rope op."""

from __future__ import annotations

from typing import Final

from tokenspeed_kernel.signature import Signature
from tokenspeed_kernel.spec import TRITON_PORTABLE, Band, KernelSpec, Verified, VerifiedBy

SPECS: Final = (
    KernelSpec(
        op="rope.apply_rope",
        name="triton_apply_rope",
        solution="triton",
        band=Band.PORTABLE,
        implementation="tokenspeed_kernel.ops.rope.triton.apply_rope:apply_rope",
        capability=TRITON_PORTABLE,
        formats=tuple(Signature.of(q=text, k=text, cos_sin_cache="fp32") for text in ("fp32", "bf16", "fp16")),
        requires=("triton",),
        graph_safe=True,
        verified=(
            Verified(VerifiedBy.SILICON, "H200 (sm_90)"),
            Verified(VerifiedBy.INTERPRETER, "x86-64"),
            Verified(VerifiedBy.COMPILED, "sm_100, gfx950"),
        ),
    ),
    KernelSpec(
        op="rope.multi_axis_cos_sin",
        name="triton_multi_axis_cos_sin",
        solution="triton",
        band=Band.PORTABLE,
        implementation="tokenspeed_kernel.ops.rope.triton.multi_axis:multi_axis_cos_sin",
        capability=TRITON_PORTABLE,
        formats=Signature.same(("cos_sin_cache",), ("fp32",)),
        requires=("triton",),
        graph_safe=True,
        verified=(
            Verified(VerifiedBy.SILICON, "H200 (sm_90)"),
            Verified(VerifiedBy.INTERPRETER, "x86-64"),
            Verified(VerifiedBy.COMPILED, "sm_80, sm_90, sm_100, sm_120, gfx942, gfx950"),
        ),
    ),
)
