"""Reference kernels of the kvcache family."""

from __future__ import annotations

from typing import Final

from tokenspeed_kernel.ops.kvcache.contract import CONTRACTS
from tokenspeed_kernel.spec import ANYWHERE, Band, KernelSpec

SPECS: Final = tuple(
    KernelSpec(
        op=contract.name,
        name=f"reference_{contract.name.partition('.')[2]}",
        solution="reference",
        band=Band.REFERENCE,
        implementation=f"tokenspeed_kernel.ops.kvcache.reference:{contract.name.partition('.')[2]}",
        capability=ANYWHERE,
    )
    for contract in CONTRACTS
)
