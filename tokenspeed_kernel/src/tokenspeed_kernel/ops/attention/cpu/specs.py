"""Attention kernels for the host processor."""

from __future__ import annotations

from typing import Final

from tokenspeed_kernel.ops.attention.contract import SCALED_FORMATS
from tokenspeed_kernel.signature import Signature
from tokenspeed_kernel.spec import CPU, Band, KernelSpec, Verified, VerifiedBy
from tokenspeed_kernel.traits import OneOf

_FORMATS: Final = ("fp64", "fp32", "bf16", "fp16")
_EVERY_OPTION: Final = {name: OneOf(False, True) for name in ("causal", "sliding_window", "logit_cap", "sinks", "return_lse")}


def _fp8_caches(operands: tuple[str, ...]) -> tuple[Signature, ...]:
    """Paged caches may hold fp8 numbers as they stand; see `scaling`."""
    if operands[1] != "k_cache":
        return ()
    return tuple(Signature.of(q=text, k_cache="fp8_e4m3@none", v_cache="fp8_e4m3@none") for text in _FORMATS)


def _spec(op: str, operands: tuple[str, ...]) -> KernelSpec:
    traits = dict(_EVERY_OPTION)
    scaled = op.endswith("_scaled")
    if op.startswith("mha_decode"):
        del traits["causal"]
    return KernelSpec(
        op=f"attention.{op}",
        name=f"cpu_{op}",
        solution="cpu",
        band=Band.PERFORMANT,
        implementation=f"tokenspeed_kernel.ops.attention.cpu.{'scaled' if scaled else 'mha'}:{op}",
        capability=CPU,
        formats=SCALED_FORMATS if scaled else (*Signature.same(operands, _FORMATS), *_fp8_caches(operands)),
        traits=traits,
        verified=(Verified(VerifiedBy.SILICON, "x86-64 AVX2"),),
    )


SPECS: Final = (
    _spec("mha_prefill", ("q", "k", "v")),
    _spec("mha_extend", ("q", "k_cache", "v_cache")),
    _spec("mha_decode", ("q", "k_cache", "v_cache")),
    _spec("mha_extend_scaled", ("q", "k_cache", "v_cache")),
    _spec("mha_decode_scaled", ("q", "k_cache", "v_cache")),
    KernelSpec(
        op="attention.merge_states",
        name="cpu_merge_states",
        solution="cpu",
        band=Band.PERFORMANT,
        implementation="tokenspeed_kernel.ops.attention.cpu.merge:merge_states",
        capability=CPU,
        formats=Signature.same(("outs",), _FORMATS),
        verified=(Verified(VerifiedBy.SILICON, "x86-64 AVX2"),),
    ),
)
