"""Reference kernels of the norm ops."""

from __future__ import annotations

from tokenspeed_kernel.ops.norm.contract import CONTRACTS
from tokenspeed_kernel.spec import ANYWHERE, Band, KernelSpec

__all__ = ["SPECS"]

SPECS = tuple(
    KernelSpec(
        op=contract.name,
        name=f"reference_{contract.name.partition('.')[2]}",
        solution="reference",
        band=Band.REFERENCE,
        implementation=f"tokenspeed_kernel.ops.norm.reference:{contract.name.partition('.')[2]}",
        capability=ANYWHERE,
    )
    for contract in CONTRACTS
)
