"""Latent attention kernels for Hopper."""

from __future__ import annotations

from typing import Final

from tokenspeed_kernel.ops.mla.hopper.prefill_specs import PREFILL_SPECS
from tokenspeed_kernel.signature import Signature
from tokenspeed_kernel.spec import Band, Capability, KernelSpec, Verified, VerifiedBy
from tokenspeed_kernel.traits import OneOf

__all__ = ["SPECS"]

_BOTH: Final = OneOf(False, True)


def _decode(name: str, band: Band, priority: int, *, single_block: OneOf = _BOTH, few_rows: bool) -> KernelSpec:
    return KernelSpec(
        op="mla.mla_decode",
        name=name,
        solution="gluon",
        band=band,
        priority=priority,
        implementation="tokenspeed_kernel.ops.mla.hopper.decode:mla_decode",
        capability=Capability(("sm_90a",)),
        formats=Signature.same(("q", "kv_cache"), ("bf16",)),
        traits={
            "latent_dim": OneOf(512),
            "rope_dim": OneOf(64),
            "page_size": OneOf(64),
            "single_block": single_block,
            "few_rows": OneOf(few_rows),
            "causal": _BOTH,
            "return_lse": _BOTH,
        },
        requires=("triton",),
        graph_safe=True,
        verified=(
            Verified(VerifiedBy.SILICON, "H200 (sm_90)", "ragged batches, graphs with other lengths, Triton 3.6"),
            Verified(VerifiedBy.COMPILED, "sm_90a", "Triton 3.6 and 3.9: wgmma, bulk copies; nothing stored to memory in the loop"),
        ),
    )


# Measured on an H200 (perf/baselines/h200/hopper.mla_decode.txt).
SPECS: Final = (
    _decode("gluon_mla_decode_sm90", Band.SPECIALIZED, 0, few_rows=True),
    _decode("gluon_mla_decode_wide_sm90", Band.SPECIALIZED, 0, single_block=OneOf(True), few_rows=False),
    _decode("gluon_mla_decode_batch_sm90", Band.PORTABLE, 1, single_block=OneOf(False), few_rows=False),
    KernelSpec(
        op="mla.rope_write_mla",
        name="hopper_rope_write_mla",
        solution="hopper",
        band=Band.SPECIALIZED,
        implementation="tokenspeed_kernel.ops.mla.hopper.rope_write:rope_write_mla",
        capability=Capability(("sm_90a",), interpreter=True),
        formats=tuple(
            Signature.of(q_rope=text, k_rope=text, latent=text, cos_sin_cache="fp32", kv_cache=text)
            for text in ("fp32", "bf16", "fp16")
        ),
        requires=("triton",),
        graph_safe=True,
        verified=(
            Verified(VerifiedBy.SILICON, "H200 (sm_90)", "each number that of the two ops; a graph of chained launches only timed"),
            Verified(VerifiedBy.INTERPRETER, "x86-64"),
            Verified(VerifiedBy.COMPILED, "sm_90a", "Triton 3.6 and 3.9"),
        ),
    ),
    *PREFILL_SPECS,
)
