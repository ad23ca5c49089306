"""The reference kernels of the attention family."""

from __future__ import annotations

from typing import Final

from tokenspeed_kernel.spec import ANYWHERE, Band, KernelSpec

SPECS: Final = tuple(
    KernelSpec(
        op=f"attention.{op}",
        name=f"reference_{op}",
        solution="reference",
        band=Band.REFERENCE,
        implementation=f"tokenspeed_kernel.ops.attention.reference:{op}",
        capability=ANYWHERE,
    )
    for op in ("mha_prefill", "mha_extend", "mha_decode", "merge_states")
)
