"""Latent attention kernels for the host processor."""

from __future__ import annotations

from typing import Final

from tokenspeed_kernel.signature import Signature
from tokenspeed_kernel.spec import CPU, Band, KernelSpec, Verified, VerifiedBy
from tokenspeed_kernel.traits import OneOf

__all__ = ["SPECS"]

_FORMATS: Final = ("fp64", "fp32", "bf16", "fp16")
# Packed rows of fp8 (see `packed`).
_PACKED: Final = tuple(Signature.of(q=queries, kv_cache="uint8") for queries in _FORMATS)
_BOTH: Final = OneOf(False, True)
_VERIFIED: Final = (Verified(VerifiedBy.SILICON, "x86-64 AVX2"),)


def _spec(op: str, module: str, operands: tuple[str, ...], *more: Signature) -> KernelSpec:
    return KernelSpec(
        op=f"mla.{op}",
        name=f"cpu_{op}",
        solution="cpu",
        band=Band.PERFORMANT,
        implementation=f"tokenspeed_kernel.ops.mla.cpu.{module}:{op}",
        capability=CPU,
        formats=(*Signature.same(operands, _FORMATS), *more),
        traits={"causal": _BOTH, "return_lse": _BOTH},
        verified=_VERIFIED,
    )


SPECS: Final = (
    _spec("mla_decode", "paged", ("q", "kv_cache"), *_PACKED),
    _spec("mla_extend", "paged", ("q", "kv_cache"), *_PACKED),
    _spec("mla_prefill", "prefill", ("q", "k", "v")),
    KernelSpec(
        op="mla.write_mla_cache",
        name="cpu_write_mla_cache",
        solution="cpu",
        band=Band.PERFORMANT,
        implementation="tokenspeed_kernel.ops.mla.cpu.write:write_mla_cache",
        capability=CPU,
        formats=tuple(Signature.of(latent=new, rope=new, kv_cache=kept) for new in _FORMATS for kept in (*_FORMATS, "uint8")),
        verified=_VERIFIED,
    ),
    KernelSpec(
        op="mla.rope_write_mla",
        name="cpu_rope_write_mla",
        solution="cpu",
        band=Band.PERFORMANT,
        implementation="tokenspeed_kernel.ops.mla.cpu.rope_write:rope_write_mla",
        capability=CPU,
        formats=tuple(
            Signature.of(q_rope=text, k_rope=text, latent=text, cos_sin_cache="fp32", kv_cache=text) for text in _FORMATS
        ),
        verified=_VERIFIED,
    ),
)
