"""The reference kernel of the rope family."""

from __future__ import annotations

from typing import Final

from tokenspeed_kernel.spec import ANYWHERE, Band, KernelSpec

SPECS: Final = (
    KernelSpec(
        op="rope.apply_rope",
        name="reference_apply_rope",
        solution="reference",
        band=Band.REFERENCE,
        implementation="tokenspeed_kernel.ops.rope.reference:apply_rope",
        capability=ANYWHERE,
    ),
    KernelSpec(
        op="rope.multi_axis_cos_sin",
        name="reference_multi_axis_cos_sin",
        solution="reference",
        band=Band.REFERENCE,
        implementation="tokenspeed_kernel.ops.rope.reference:multi_axis_cos_sin",
        capability=ANYWHERE,
    ),
)
