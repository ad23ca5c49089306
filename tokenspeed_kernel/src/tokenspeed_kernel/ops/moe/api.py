"""Public ops of the mixture of experts, each from its own module."""

from __future__ import annotations

from tokenspeed_kernel.ops.moe.apply import apply
from tokenspeed_kernel.ops.moe.experts import fused_experts
from tokenspeed_kernel.ops.moe.permute import permute, unpermute
from tokenspeed_kernel.ops.moe.plan import plan
from tokenspeed_kernel.ops.moe.routing import topk_routing
from tokenspeed_kernel.ops.moe.weights import process_shared_expert, process_weights

__all__ = ["apply", "fused_experts", "permute", "plan", "process_shared_expert", "process_weights", "topk_routing", "unpermute"]
