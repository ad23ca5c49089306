"""Mixture of experts: routing, permutation, and the experts themselves.

A layer that is kept has a life of typed steps: `plan` -> `process_weights` -> `apply`.
"""

from tokenspeed_kernel.ops.moe.api import (
    apply,
    fused_experts,
    permute,
    plan,
    process_shared_expert,
    process_weights,
    topk_routing,
    unpermute,
)
from tokenspeed_kernel.ops.moe.gate import GatedActivation
from tokenspeed_kernel.ops.moe.plan import MoeConfig, MoePlan
from tokenspeed_kernel.ops.moe.weights import MoeWeights, SharedExpert

__all__ = [
    "GatedActivation",
    "MoeConfig",
    "MoePlan",
    "MoeWeights",
    "SharedExpert",
    "apply",
    "fused_experts",
    "permute",
    "plan",
    "process_shared_expert",
    "process_weights",
    "topk_routing",
    "unpermute",
]
