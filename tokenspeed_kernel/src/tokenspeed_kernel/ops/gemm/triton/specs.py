"""Triton kernels of the matrix products."""

from __future__ import annotations

from tokenspeed_kernel.ops.gemm.contract import (
    BMM,
    GROUPED_MM_CONTIGUOUS,
    GROUPED_MM_MASKED,
    MM,
    grouped_formats,
    mm_formats,
    scaled_formats,
    weight_only_formats,
)
from tokenspeed_kernel.spec import TRITON_PORTABLE, Band, KernelSpec, Verified, VerifiedBy
from tokenspeed_kernel.traits import OneOf

__all__ = ["SPECS"]

_SILICON = Verified(VerifiedBy.SILICON, "H200 (sm_90)")

SPECS = (
    KernelSpec(
        op=MM.name,
        name="triton_mm",
        solution="triton",
        band=Band.PORTABLE,
        implementation="tokenspeed_kernel.ops.gemm.triton.mm:mm",
        capability=TRITON_PORTABLE,
        formats=mm_formats(mixed_bias=True),
        requires=("triton",),
        graph_safe=True,
        verified=(
            _SILICON,
            Verified(VerifiedBy.INTERPRETER, "x86-64"),
            Verified(VerifiedBy.COMPILED, "sm_80, sm_90, sm_100, sm_120, gfx942, gfx950"),
        ),
    ),
    *(
        KernelSpec(
            op=contract.name,
            name=f"triton_{name}",
            solution="triton",
            band=Band.PORTABLE,
            implementation=f"tokenspeed_kernel.ops.gemm.triton.{implementation}",
            capability=TRITON_PORTABLE,
            formats=formats,
            requires=("triton",),
            # Of another priority than triton_mm, with which it shares no format: so nothing has to be compared.
            priority=5,
            graph_safe=True,
            verified=(_SILICON, Verified(VerifiedBy.INTERPRETER, "x86-64")),
        )
        for contract, name, implementation, formats in (
            (MM, "mm_scaled", "mm_scaled:mm", weight_only_formats() + scaled_formats()),
            (BMM, "bmm", "grouped:bmm", grouped_formats()),
            (
                GROUPED_MM_CONTIGUOUS,
                "grouped_mm_contiguous",
                "grouped:grouped_mm_contiguous",
                grouped_formats("offsets") + grouped_formats("expert_ids"),
            ),
            (GROUPED_MM_MASKED, "grouped_mm_masked", "grouped:grouped_mm_masked", grouped_formats("masked_m")),
        )
    ),
    KernelSpec(
        op=MM.name,
        name="triton_mm_few_rows",
        solution="triton",
        band=Band.PORTABLE,
        implementation="tokenspeed_kernel.ops.gemm.triton.few_rows:mm",
        capability=TRITON_PORTABLE,
        formats=mm_formats(mixed_bias=True) + weight_only_formats() + scaled_formats(),
        traits={"max_rows": OneOf(1, 16)},
        requires=("triton",),
        priority=10,
        graph_safe=True,
        verified=(_SILICON, Verified(VerifiedBy.INTERPRETER, "x86-64")),
    ),
)
