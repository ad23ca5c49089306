"""The reference kernel of the kvcache family."""

from __future__ import annotations

from typing import Final

from tokenspeed_kernel.spec import ANYWHERE, Band, KernelSpec

SPECS: Final = (
    KernelSpec(
        op="kvcache.write_kv",
        name="reference_write_kv",
        solution="reference",
        band=Band.REFERENCE,
        implementation="tokenspeed_kernel.ops.kvcache.reference:write_kv",
        capability=ANYWHERE,
    ),
)
