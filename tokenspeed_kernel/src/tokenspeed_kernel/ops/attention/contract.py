"""What the attention ops are: operands, parameters, and the traits that a kernel may restrict."""

from __future__ import annotations

from typing import Final

from tokenspeed_kernel.signature import Signature
from tokenspeed_kernel.spec import OpContract
from tokenspeed_kernel.traits import Trait

_HEAD_DIM: Final = Trait("head_dim", "elements of one head, of keys and values alike")
_PAGE_SIZE: Final = Trait("page_size", "tokens in a page of the cache")
_CAUSAL: Final = Trait("causal", "queries see no later key", default=True)
_WINDOW: Final = Trait("sliding_window", "queries see only the latest keys", default=False)
_LOGIT_CAP: Final = Trait("logit_cap", "logits pass through a scaled tanh", default=False)
_SINKS: Final = Trait("sinks", "each head has one more term in its softmax's denominator", default=False)
_LSE: Final = Trait("return_lse", "the log of the softmax's denominator is returned too", default=False)

_OPTIONS: Final = ("softmax_scale", "causal", "sliding_window", "logit_cap", "sinks", "return_lse", "out")

MHA_PREFILL: Final = OpContract(
    name="attention.mha_prefill",
    operands=("q", "k", "v"),
    parameters=("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", *_OPTIONS),
    traits=(_HEAD_DIM, _CAUSAL, _WINDOW, _LOGIT_CAP, _SINKS, _LSE),
    summary="softmax attention of ragged queries to ragged keys",
    by_position=True,
)
MHA_EXTEND: Final = OpContract(
    name="attention.mha_extend",
    operands=("q", "k_cache", "v_cache"),
    parameters=(
        *("q", "k_cache", "v_cache", "page_table", "cu_seqlens_q", "seq_lens", "max_seqlen_q", "max_seqlen_k"),
        *(*_OPTIONS, "plan"),
    ),
    traits=(_HEAD_DIM, _PAGE_SIZE, _CAUSAL, _WINDOW, _LOGIT_CAP, _SINKS, _LSE),
    summary="softmax attention of each request's new queries to its paged cache",
    by_position=True,
)
MHA_DECODE: Final = OpContract(
    name="attention.mha_decode",
    operands=("q", "k_cache", "v_cache"),
    parameters=(
        *("q", "k_cache", "v_cache", "page_table", "seq_lens", "max_seqlen_k"),
        *(*(name for name in _OPTIONS if name != "causal"), "plan"),
    ),
    traits=(_HEAD_DIM, _PAGE_SIZE, _WINDOW, _LOGIT_CAP, _SINKS, _LSE),
    summary="softmax attention of each request's newest query to its paged cache",
    by_position=True,
)
MHA_EXTEND_SCALED: Final = OpContract(
    name="attention.mha_extend_scaled",
    operands=MHA_EXTEND.operands,
    parameters=(*MHA_EXTEND.parameters[:6], "k_scale", "v_scale", *MHA_EXTEND.parameters[6:]),
    traits=MHA_EXTEND.traits,
    summary="mha_extend to an fp8 cache with scales",
    by_position=True,
)
MHA_DECODE_SCALED: Final = OpContract(
    name="attention.mha_decode_scaled",
    operands=MHA_DECODE.operands,
    parameters=(*MHA_DECODE.parameters[:5], "k_scale", "v_scale", *MHA_DECODE.parameters[5:]),
    traits=MHA_DECODE.traits,
    summary="mha_decode to an fp8 cache with scales",
    by_position=True,
)

MERGE_STATES: Final = OpContract(
    name="attention.merge_states",
    operands=("outs",),
    parameters=("outs", "lses", "out", "lse_out"),
    traits=(Trait("num_states", "partial states that are merged"), Trait("head_dim", "elements of one head's output")),
    summary="the attention state over all keys, from states over parts of them",
    by_position=True,
)

CONTRACTS: Final = (MHA_PREFILL, MHA_EXTEND, MHA_DECODE, MHA_EXTEND_SCALED, MHA_DECODE_SCALED, MERGE_STATES)

SCALED_FORMATS: Final = tuple(
    Signature.of(q=q, k_cache=f"fp8_e4m3@{keys}", v_cache=f"fp8_e4m3@{values}")
    for q in ("fp32", "bf16", "fp16")
    for keys in ("tensor", "head")
    for values in ("tensor", "head")
)
"""Formats that the CPU and Triton kernels for scaled caches take: one scale for all heads, or one for each."""
