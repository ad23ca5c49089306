"""Multi-head and grouped-query attention over ragged and paged keys."""

from tokenspeed_kernel.ops.attention.api import mha_decode, mha_extend, mha_prefill
from tokenspeed_kernel.ops.attention.plan import AttentionPlan, plan

__all__ = ["AttentionPlan", "mha_decode", "mha_extend", "mha_prefill", "plan"]
