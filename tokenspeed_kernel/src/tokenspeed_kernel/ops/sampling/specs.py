"""The references of the sampling family."""

from __future__ import annotations

from tokenspeed_kernel.ops.sampling.contract import CONTRACTS
from tokenspeed_kernel.spec import ANYWHERE, Band, KernelSpec

SPECS = tuple(
    KernelSpec(
        op=contract.name,
        name=f"reference_{contract.name.partition('.')[2]}",
        solution="reference",
        band=Band.REFERENCE,
        implementation=f"tokenspeed_kernel.ops.sampling.reference:reference_{contract.name.partition('.')[2]}",
        capability=ANYWHERE,
    )
    for contract in CONTRACTS
)
