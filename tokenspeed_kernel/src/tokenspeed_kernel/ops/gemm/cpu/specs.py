"""CPU kernels of the matrix products."""

from __future__ import annotations

from tokenspeed_kernel.ops.gemm.contract import (
    BMM,
    GROUPED_MM_CONTIGUOUS,
    GROUPED_MM_MASKED,
    MM,
    PACK_WEIGHT,
    grouped_formats,
    mm_formats,
    scaled_formats,
    weight_only_formats,
)
from tokenspeed_kernel.signature import Signature
from tokenspeed_kernel.spec import CPU, Band, Capability, KernelSpec, Verified, VerifiedBy

__all__ = ["SPECS"]

SPECS = (
    KernelSpec(
        op=MM.name,
        name="cpu_mm",
        solution="cpu",
        band=Band.PERFORMANT,
        implementation="tokenspeed_kernel.ops.gemm.cpu.mm:mm",
        capability=CPU,
        formats=mm_formats(mixed_bias=True),
        verified=(Verified(VerifiedBy.SILICON, "x86-64"),),
    ),
    KernelSpec(
        op=MM.name,
        name="cpu_mm_bf16",
        solution="cpu",
        band=Band.PERFORMANT,
        implementation="tokenspeed_kernel.ops.gemm.cpu.mm:mm_bf16",
        capability=Capability(("cpu",), frozenset({"bf16_dot"})),
        # Another output than bf16 would be rounded twice, so that cpu_mm takes it.
        formats=(Signature.of(x="bf16", weight="bf16", bias="bf16", out="bf16"),),
        priority=10,
        verified=(Verified(VerifiedBy.SILICON, "x86-64 AVX512_BF16"),),
    ),
    KernelSpec(
        op=MM.name,
        name="cpu_mm_scaled",
        solution="cpu",
        band=Band.PERFORMANT,
        implementation="tokenspeed_kernel.ops.gemm.cpu.mm_scaled:mm",
        capability=CPU,
        formats=weight_only_formats() + scaled_formats(),
        # Of another priority than cpu_mm, with which it shares no format: so nothing has to be compared.
        priority=5,
        verified=(Verified(VerifiedBy.SILICON, "x86-64"),),
    ),
    KernelSpec(
        op=PACK_WEIGHT.name,
        name="onednn_pack_weight",
        solution="onednn",
        band=Band.PERFORMANT,
        implementation="tokenspeed_kernel.ops.gemm.cpu.onednn_packed:pack_weight",
        # oneDNN's blocked products are made for x86; builds for other processors may lack it.
        capability=Capability(("cpu",), frozenset({"avx2"})),
        formats=(Signature.of(weight="fp32"),),
        verified=(Verified(VerifiedBy.SILICON, "x86-64"),),
    ),
    *(
        KernelSpec(
            op=contract.name,
            name=f"cpu_{function}",
            solution="cpu",
            band=Band.PERFORMANT,
            implementation=f"tokenspeed_kernel.ops.gemm.cpu.grouped:{function}",
            capability=CPU,
            formats=formats,
            verified=(Verified(VerifiedBy.SILICON, "x86-64"),),
        )
        for contract, function, formats in (
            (BMM, "bmm", grouped_formats()),
            (GROUPED_MM_CONTIGUOUS, "grouped_mm_contiguous", grouped_formats("offsets") + grouped_formats("expert_ids")),
            (GROUPED_MM_MASKED, "grouped_mm_masked", grouped_formats("masked_m")),
        )
    ),
)
