"""Latent attention kernels in Triton."""

from __future__ import annotations

from typing import Final

from tokenspeed_kernel.signature import Signature
from tokenspeed_kernel.spec import TRITON_PORTABLE, Band, KernelSpec, Verified, VerifiedBy
from tokenspeed_kernel.traits import Constraint, OneOf, Range

__all__ = ["SPECS"]

_FORMATS: Final = ("fp32", "bf16", "fp16")
# Packed rows of fp8 (see `packed`), decoded in integer arithmetic where the device has no conversion.
_PACKED: Final = tuple(Signature.of(q=queries, kv_cache="uint8") for queries in _FORMATS)
_BOTH: Final = OneOf(False, True)
_VERIFIED: Final = (
    Verified(VerifiedBy.SILICON, "H200 (sm_90)"),
    Verified(VerifiedBy.INTERPRETER, "x86-64"),
    Verified(VerifiedBy.COMPILED, "sm_80, sm_90, sm_100, sm_120, gfx942, gfx950"),
)
_VERIFIED_PLAIN: Final = (Verified(VerifiedBy.SILICON, "H200 (sm_90)", "all but packed rows"), *_VERIFIED[1:])
_VERIFIED_IN_PART: Final = (Verified(VerifiedBy.SILICON, "H200 (sm_90)", "20 of 24 tests, none failed"), *_VERIFIED[1:])


def _spec(op: str, module: str, operands: tuple[str, ...], *more: Signature, **dims: Constraint) -> KernelSpec:
    return KernelSpec(
        op=f"mla.{op}",
        name=f"triton_{op}",
        solution="triton",
        band=Band.PORTABLE,
        implementation=f"tokenspeed_kernel.ops.mla.triton.{module}:{op}",
        capability=TRITON_PORTABLE,
        formats=(*Signature.same(operands, _FORMATS), *more),
        traits={"causal": _BOTH, "return_lse": _BOTH, **dims},
        requires=("triton",),
        graph_safe=True,
        verified=_VERIFIED_PLAIN if more else _VERIFIED,
    )


SPECS: Final = (
    # A row of accumulators lies in registers; any page size will do, multiples of the key tile are fastest.
    _spec("mla_decode", "paged", ("q", "kv_cache"), *_PACKED, latent_dim=Range(1, 512), rope_dim=Range(1, 128)),
    _spec("mla_extend", "paged", ("q", "kv_cache"), *_PACKED, latent_dim=Range(1, 512), rope_dim=Range(1, 128)),
    _spec("mla_prefill", "prefill", ("q", "k", "v"), head_dim=Range(1, 256), v_head_dim=Range(1, 256)),
    KernelSpec(
        op="mla.write_mla_cache",
        name="triton_write_mla_cache",
        solution="triton",
        band=Band.PORTABLE,
        implementation="tokenspeed_kernel.ops.mla.triton.write:write_mla_cache",
        capability=TRITON_PORTABLE,
        formats=tuple(Signature.of(latent=new, rope=new, kv_cache=kept) for new in _FORMATS for kept in (*_FORMATS, "uint8")),
        requires=("triton",),
        graph_safe=True,
        verified=_VERIFIED_PLAIN,
    ),
    KernelSpec(
        op="mla.rope_write_mla",
        name="triton_rope_write_mla",
        solution="triton",
        band=Band.PORTABLE,
        implementation="tokenspeed_kernel.ops.mla.triton.rope_write:rope_write_mla",
        capability=TRITON_PORTABLE,
        formats=tuple(
            Signature.of(q_rope=text, k_rope=text, latent=text, cos_sin_cache="fp32", kv_cache=text) for text in _FORMATS
        ),
        requires=("triton",),
        graph_safe=True,
        verified=_VERIFIED_IN_PART,
    ),
)
