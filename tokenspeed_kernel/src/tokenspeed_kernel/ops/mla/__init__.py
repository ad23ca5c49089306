"""Multi-head latent attention: over a paged cache of latent rows, and expanded over ragged keys."""

from tokenspeed_kernel.ops.attention.plan import AttentionPlan, plan
from tokenspeed_kernel.ops.mla.api import mla_decode, mla_extend, mla_prefill, rope_write_mla, write_mla_cache

__all__ = ["AttentionPlan", "mla_decode", "mla_extend", "mla_prefill", "plan", "rope_write_mla", "write_mla_cache"]
