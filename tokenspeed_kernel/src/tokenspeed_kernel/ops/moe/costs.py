"""Least work of the experts: the weights of those that some token picks are read, and each pair of token and expert multiplied."""

from __future__ import annotations

from typing import Any, Final

import torch

from tokenspeed_kernel.case import Cost
from tokenspeed_kernel.ops.moe.contract import FUSED_EXPERTS, PERMUTE, TOPK_ROUTING, UNPERMUTE

__all__ = ["COSTS"]


def _bytes_of(weight: Any) -> int:
    stored = getattr(weight, "size_bytes", None)  # of a quantized one
    return int(weight.numel() * weight.element_size() if stored is None else stored)


def _local_ids(inputs: dict[str, Any]) -> torch.Tensor:
    """Experts of the pairs that are computed here; ids of others' experts, and -1, are not."""
    ids: torch.Tensor = inputs["topk_ids"]
    first, count = int(inputs.get("first_expert", 0)), int(inputs["w13"].shape[0])
    return ids[(ids >= first) & (ids < first + count)]


def _moved_bytes(inputs: dict[str, Any], result: torch.Tensor) -> int:
    x, ids = inputs["x"], inputs["topk_ids"]
    picked, count = len(set(_local_ids(inputs).tolist())), max(int(inputs["w13"].shape[0]), 1)
    weights = (_bytes_of(inputs["w13"]) + _bytes_of(inputs["w2"])) * picked // count
    tensors = [x, ids, inputs["topk_weights"], result]
    return weights + sum(int(one.numel() * one.element_size()) for one in tensors)


def _flops(inputs: dict[str, Any]) -> int:
    products = sum(inputs[name].shape[-2] * inputs[name].shape[-1] for name in ("w13", "w2"))
    return int(2 * _local_ids(inputs).numel() * products)


COSTS: Final = {
    FUSED_EXPERTS.name: Cost(_moved_bytes, _flops),
    # These move each row once, and bandwidth alone is the limit.
    **{op.name: Cost() for op in (PERMUTE, TOPK_ROUTING, UNPERMUTE)},
}
"""By op."""
