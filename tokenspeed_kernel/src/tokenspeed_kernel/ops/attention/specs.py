"""The reference kernels of the attention family."""

from __future__ import annotations

from typing import Final

from tokenspeed_kernel.spec import ANYWHERE, Band, KernelSpec

_MODULES: Final = {"mha_extend_scaled": "reference_scaled", "mha_decode_scaled": "reference_scaled"}

SPECS: Final = tuple(
    KernelSpec(
        op=f"attention.{op}",
        name=f"reference_{op}",
        solution="reference",
        band=Band.REFERENCE,
        implementation=f"tokenspeed_kernel.ops.attention.{_MODULES.get(op, 'reference')}:{op}",
        capability=ANYWHERE,
    )
    for op in ("mha_prefill", "mha_extend", "mha_decode", "mha_extend_scaled", "mha_decode_scaled", "merge_states")
)
