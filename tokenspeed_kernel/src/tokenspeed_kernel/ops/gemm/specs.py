"""Reference kernels of the matrix products."""

from __future__ import annotations

from tokenspeed_kernel.ops.gemm.contract import BMM, GROUPED_MM_CONTIGUOUS, GROUPED_MM_MASKED, MM, PACK_WEIGHT
from tokenspeed_kernel.spec import ANYWHERE, Band, KernelSpec

__all__ = ["SPECS"]

SPECS = (
    KernelSpec(
        op=MM.name,
        name="reference_mm",
        solution="reference",
        band=Band.REFERENCE,
        implementation="tokenspeed_kernel.ops.gemm.reference:mm",
        capability=ANYWHERE,
    ),
    KernelSpec(
        op=PACK_WEIGHT.name,
        name="reference_pack_weight",
        solution="reference",
        band=Band.REFERENCE,
        implementation="tokenspeed_kernel.ops.gemm.plain:reference_pack_weight",
        capability=ANYWHERE,
    ),
    KernelSpec(
        op=PACK_WEIGHT.name,
        name="plain_pack_weight",
        solution="plain",
        band=Band.PORTABLE,
        implementation="tokenspeed_kernel.ops.gemm.plain:pack_weight",
        capability=ANYWHERE,
    ),
    *(
        KernelSpec(
            op=contract.name,
            name=f"reference_{function}",
            solution="reference",
            band=Band.REFERENCE,
            implementation=f"tokenspeed_kernel.ops.gemm.grouped_reference:{function}",
            capability=ANYWHERE,
        )
        for contract, function in (
            (BMM, "bmm"),
            (GROUPED_MM_CONTIGUOUS, "grouped_mm_contiguous"),
            (GROUPED_MM_MASKED, "grouped_mm_masked"),
        )
    ),
)
