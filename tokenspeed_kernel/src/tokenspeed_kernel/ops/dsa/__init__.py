"""Sparse attention over the latent cache: an indexer scores keys, the best are taken, and only these are attended."""

from tokenspeed_kernel.ops.dsa.api import indexer_scores, indexer_scores_ragged, sparse_decode, sparse_prefill, topk_slots

__all__ = ["indexer_scores", "indexer_scores_ragged", "sparse_decode", "sparse_prefill", "topk_slots"]
