"""Public ops of the mixture of experts, each from its own module."""

from __future__ import annotations

from tokenspeed_kernel.ops.moe.experts import fused_experts
from tokenspeed_kernel.ops.moe.permute import permute, unpermute
from tokenspeed_kernel.ops.moe.routing import topk_routing

__all__ = ["fused_experts", "permute", "topk_routing", "unpermute"]
