"""Public ops of the family, one module each.

A layer calls them in this order: `indexer_scores` (or `indexer_scores_ragged`) gives each query a score for each key of its
request, `topk_slots` turns the best k of each row into slots of the cache, and `sparse_decode` or `sparse_prefill` attends these
slots alone.
"""

from tokenspeed_kernel.ops.dsa.indexer import indexer_scores, indexer_scores_ragged
from tokenspeed_kernel.ops.dsa.sparse import sparse_decode, sparse_prefill
from tokenspeed_kernel.ops.dsa.topk import topk_slots

__all__ = ["indexer_scores", "indexer_scores_ragged", "sparse_decode", "sparse_prefill", "topk_slots"]
