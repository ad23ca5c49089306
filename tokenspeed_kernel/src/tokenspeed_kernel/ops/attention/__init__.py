"""Multi-head and grouped-query attention over ragged and paged keys, and the merging of partial states."""

from tokenspeed_kernel.ops.attention.api import merge_states, mha_decode, mha_extend, mha_prefill
from tokenspeed_kernel.ops.attention.plan import AttentionPlan, plan

__all__ = ["AttentionPlan", "merge_states", "mha_decode", "mha_extend", "mha_prefill", "plan"]
