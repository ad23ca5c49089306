"""Mixture of experts: routing, permutation, and the experts themselves."""

from tokenspeed_kernel.ops.moe.api import fused_experts, permute, topk_routing, unpermute
from tokenspeed_kernel.ops.moe.gate import GatedActivation

__all__ = ["GatedActivation", "fused_experts", "permute", "topk_routing", "unpermute"]
