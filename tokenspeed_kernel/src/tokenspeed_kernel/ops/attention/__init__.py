"""Multi-head and grouped-query attention over ragged and paged keys, and the merging of partial states."""

from tokenspeed_kernel.ops.attention.api import merge_states, mha_decode, mha_extend, mha_prefill
from tokenspeed_kernel.ops.attention.plan import AttentionPlan, plan
from tokenspeed_kernel.ops.attention.scaled_cache import mha_decode_scaled, mha_extend_scaled

__all__ = [
    "AttentionPlan",
    "merge_states",
    "mha_decode",
    "mha_decode_scaled",
    "mha_extend",
    "mha_extend_scaled",
    "mha_prefill",
    "plan",
]
