"""What the latent attention ops are: operands, parameters, and the traits that a kernel may restrict."""

from __future__ import annotations

from typing import Final

from tokenspeed_kernel.spec import OpContract
from tokenspeed_kernel.traits import Trait

__all__ = ["CONTRACTS", "MLA_DECODE", "MLA_EXTEND", "MLA_PREFILL", "ROPE_WRITE_MLA", "WRITE_MLA_CACHE"]

_LATENT_DIM: Final = Trait("latent_dim", "elements of a cached row that are key and value")
_ROPE_DIM: Final = Trait("rope_dim", "elements of a cached row that are key alone")
_PAGE_SIZE: Final = Trait("page_size", "tokens in a page of the cache")
_CAUSAL: Final = Trait("causal", "queries see no later key", default=True)
_SINGLE_BLOCK: Final = Trait("single_block", "one request of at most 64 rows, queries times heads")
_FEW_ROWS: Final = Trait("few_rows", "at most 16 rows a request, queries times heads")
_LSE: Final = Trait("return_lse", "the log of the softmax's denominator is returned too", default=False)

MLA_DECODE: Final = OpContract(
    name="mla.mla_decode",
    operands=("q", "kv_cache"),
    parameters=(
        *("q", "kv_cache", "page_table", "seq_lens", "max_seqlen_k", "softmax_scale", "latent_dim", "causal"),
        *("return_lse", "out", "plan"),
    ),
    traits=(_LATENT_DIM, _ROPE_DIM, _PAGE_SIZE, _CAUSAL, _LSE, _SINGLE_BLOCK, _FEW_ROWS),
    summary="attention of each request's newest queries, as many for each, to its paged latent cache",
    by_position=True,
)
MLA_EXTEND: Final = OpContract(
    name="mla.mla_extend",
    operands=("q", "kv_cache"),
    parameters=(
        *("q", "kv_cache", "page_table", "cu_seqlens_q", "seq_lens", "max_seqlen_q", "max_seqlen_k", "softmax_scale"),
        *("latent_dim", "causal", "return_lse", "out", "plan"),
    ),
    traits=(_LATENT_DIM, _ROPE_DIM, _PAGE_SIZE, _CAUSAL, _LSE),
    summary="attention of ragged new queries to their requests' paged latent cache",
    by_position=True,
)
MLA_PREFILL: Final = OpContract(
    name="mla.mla_prefill",
    operands=("q", "k", "v"),
    parameters=(
        *("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale", "causal"),
        *("return_lse", "out"),
    ),
    traits=(
        Trait("head_dim", "elements of one head of queries and keys"),
        Trait("v_head_dim", "elements of one head of values"),
        _CAUSAL,
        _LSE,
    ),
    summary="attention of ragged queries to ragged keys, expanded from their latents, whose values have another head_dim",
    by_position=True,
)
WRITE_MLA_CACHE: Final = OpContract(
    name="mla.write_mla_cache",
    operands=("latent", "rope", "kv_cache"),
    parameters=("latent", "rope", "kv_cache", "slot_mapping"),
    traits=(_LATENT_DIM, _ROPE_DIM, _PAGE_SIZE),
    summary="write new tokens' latent rows into their slots of a paged cache",
    by_position=True,
)

ROPE_WRITE_MLA: Final = OpContract(
    name="mla.rope_write_mla",
    operands=("q_rope", "k_rope", "latent", "cos_sin_cache", "kv_cache"),
    parameters=(
        *("q_rope", "k_rope", "latent", "positions", "cos_sin_cache", "kv_cache", "slot_mapping", "interleaved", "q_out"),
    ),
    traits=(
        _LATENT_DIM,
        _ROPE_DIM,
        Trait("interleaved", "a pair is two neighbours, not the same place in two halves"),
        _PAGE_SIZE,
    ),
    summary="rotate the rope parts of new queries and keys, and write latent rows into their slots of a paged cache",
    by_position=True,
)

CONTRACTS: Final = (MLA_DECODE, MLA_EXTEND, MLA_PREFILL, WRITE_MLA_CACHE, ROPE_WRITE_MLA)
