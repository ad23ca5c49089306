"""What the sparse attention ops are: operands, parameters, and the traits that a kernel may restrict."""

from __future__ import annotations

from typing import Final

from tokenspeed_kernel.spec import OpContract
from tokenspeed_kernel.traits import Trait

__all__ = [
    "CONTRACTS",
    "INDEXER_SCORES",
    "INDEXER_SCORES_RAGGED",
    "SPARSE_DECODE",
    "SPARSE_PREFILL",
    "TOPK_SLOTS",
]

_INDEX_DIM: Final = Trait("index_dim", "elements of one head of the indexer")
_INDEX_HEADS: Final = Trait("num_index_heads", "heads of the indexer")
_LATENT_DIM: Final = Trait("latent_dim", "elements of a cached row that are key and value")
_ROPE_DIM: Final = Trait("rope_dim", "elements of a cached row that are key alone")
_LSE: Final = Trait("return_lse", "the log of the softmax's denominator is returned too", default=False)

INDEXER_SCORES: Final = OpContract(
    name="dsa.indexer_scores",
    operands=("q", "k_cache"),
    parameters=(
        *("q", "weights", "k_cache", "page_table", "cu_seqlens_q", "seq_lens", "max_seqlen_q", "max_seqlen_k"),
        *("k_scale", "causal", "out"),
    ),
    traits=(_INDEX_DIM, _INDEX_HEADS),
    summary="each query's score for each key of its request, in a paged cache",
    by_position=True,
)
INDEXER_SCORES_RAGGED: Final = OpContract(
    name="dsa.indexer_scores_ragged",
    operands=("q", "k"),
    parameters=(
        *("q", "weights", "k", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"),
        *("k_scale", "causal", "out"),
    ),
    traits=(_INDEX_DIM, _INDEX_HEADS),
    summary="each query's score for each key of its request, one request after the other",
    by_position=True,
)
TOPK_SLOTS: Final = OpContract(
    name="dsa.topk_slots",
    operands=("scores",),
    parameters=("scores", "k", "page_table", "cu_seqlens_q", "page_size", "out"),
    traits=(Trait("k", "entries that are taken of each row"),),
    summary="slots of the k best scores of each row, in the order of their positions",
    by_position=True,
)
_SPARSE: Final = ("q", "kv_cache", "slots", "softmax_scale", "latent_dim", "return_lse", "out")
SPARSE_DECODE: Final = OpContract(
    name="dsa.sparse_decode",
    operands=("q", "kv_cache"),
    parameters=_SPARSE,
    traits=(_LATENT_DIM, _ROPE_DIM, _LSE),
    summary="attention of each request's newest queries to given slots of the latent cache",
    by_position=True,
)
SPARSE_PREFILL: Final = OpContract(
    name="dsa.sparse_prefill",
    operands=("q", "kv_cache"),
    parameters=_SPARSE,
    traits=(_LATENT_DIM, _ROPE_DIM, _LSE),
    summary="attention of many queries to given slots of the latent cache",
    by_position=True,
)

CONTRACTS: Final = (INDEXER_SCORES, INDEXER_SCORES_RAGGED, TOPK_SLOTS, SPARSE_DECODE, SPARSE_PREFILL)
