"""The reference kernels of the latent attention family."""

from __future__ import annotations

from typing import Final

from tokenspeed_kernel.spec import ANYWHERE, Band, KernelSpec

__all__ = ["SPECS"]

SPECS: Final = tuple(
    KernelSpec(
        op=f"mla.{op}",
        name=f"reference_{op}",
        solution="reference",
        band=Band.REFERENCE,
        implementation=f"tokenspeed_kernel.ops.mla.reference:{op}",
        capability=ANYWHERE,
    )
    for op in ("mla_decode", "mla_extend", "mla_prefill", "write_mla_cache", "rope_write_mla")
)
