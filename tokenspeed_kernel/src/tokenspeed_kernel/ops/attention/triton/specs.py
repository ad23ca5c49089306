"""Attention kernels in Triton."""

from __future__ import annotations

from typing import Final

from tokenspeed_kernel.ops.attention.contract import SCALED_FORMATS
from tokenspeed_kernel.signature import Signature
from tokenspeed_kernel.spec import TRITON_PORTABLE, Band, KernelSpec, Verified, VerifiedBy
from tokenspeed_kernel.traits import OneOf, Range

_FORMATS: Final = ("fp32", "bf16", "fp16")
_BOTH: Final = OneOf(False, True)


def _fp8_caches(operands: tuple[str, ...]) -> tuple[Signature, ...]:
    """Paged caches may hold fp8 numbers as they stand; see `scaling`."""
    if operands[1] != "k_cache":
        return ()
    return tuple(Signature.of(q=text, k_cache="fp8_e4m3@none", v_cache="fp8_e4m3@none") for text in _FORMATS)


def _spec(op: str, module: str, operands: tuple[str, ...], *, causal: bool) -> KernelSpec:
    options = ("causal", "sliding_window", "logit_cap", "sinks", "return_lse")[0 if causal else 1 :]
    return KernelSpec(
        op=f"attention.{op}",
        name=f"triton_{op}",
        solution="triton",
        band=Band.PORTABLE,
        implementation=f"tokenspeed_kernel.ops.attention.triton.{module}:{op}",
        capability=TRITON_PORTABLE,
        formats=SCALED_FORMATS if module == "scaled" else (*Signature.same(operands, _FORMATS), *_fp8_caches(operands)),
        # A row of accumulators lies in registers; any page size will do, multiples of the key tile are fastest.
        traits={"head_dim": Range(1, 256), **dict.fromkeys(options, _BOTH)},
        requires=("triton",),
        graph_safe=True,
        verified=(
            Verified(VerifiedBy.SILICON, "H200 (sm_90)", "the kernels; the scaling around them not" if module == "scaled" else ""),
            Verified(VerifiedBy.INTERPRETER, "x86-64"),
            Verified(VerifiedBy.COMPILED, "sm_90, sm_100, gfx950", "Triton 3.6: no register in memory at head_dim 64, 128"),
        ),
    )


SPECS: Final = (
    _spec("mha_prefill", "extend", ("q", "k", "v"), causal=True),
    _spec("mha_extend", "extend", ("q", "k_cache", "v_cache"), causal=True),
    _spec("mha_decode", "decode", ("q", "k_cache", "v_cache"), causal=False),
    _spec("mha_extend_scaled", "scaled", ("q", "k_cache", "v_cache"), causal=True),
    _spec("mha_decode_scaled", "scaled", ("q", "k_cache", "v_cache"), causal=False),
    KernelSpec(
        op="attention.merge_states",
        name="triton_merge_states",
        solution="triton",
        band=Band.PORTABLE,
        implementation="tokenspeed_kernel.ops.attention.triton.merge:merge_states",
        capability=TRITON_PORTABLE,
        formats=Signature.same(("outs",), _FORMATS),
        # A kernel is compiled for each number of states, with that many pointers.
        traits={"num_states": Range(1, 32), "head_dim": Range(1, 4096)},
        requires=("triton",),
        graph_safe=True,
        verified=(
            Verified(VerifiedBy.SILICON, "H200 (sm_90)"),
            Verified(VerifiedBy.INTERPRETER, "x86-64"),
            Verified(VerifiedBy.COMPILED, "sm_80, sm_90, sm_100, sm_120, gfx942, gfx950"),
        ),
    ),
)
