"""Experts on the CPU: one after the other, each with all of its tokens."""

from __future__ import annotations

import torch

from tokenspeed_kernel.ops.activation import gelu_and_mul, silu_and_mul, swiglu_clamped
from tokenspeed_kernel.ops.gemm import mm
from tokenspeed_kernel.ops.moe.cpu.permute import sort_pairs
from tokenspeed_kernel.ops.moe.gate import GatedActivation
from tokenspeed_kernel.ops.quantization import quantize
from tokenspeed_kernel.quantized import QuantizedTensor

__all__ = ["fused_experts"]


def fused_experts(
    x: torch.Tensor,
    w13: torch.Tensor | QuantizedTensor,
    w2: torch.Tensor | QuantizedTensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    activation: GatedActivation | None = None,
    activation_format: str | None = None,
    first_expert: int = 0,
    addend: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `tokenspeed_kernel.ops.moe.fused_experts`. The products are those of `gemm.mm`: a plugin's fast ones count here."""
    gate = activation or GatedActivation()
    num_experts, top_k = w13.shape[0], topk_ids.shape[1]
    pairs, offsets = sort_pairs(topk_ids, num_experts, first_expert)
    tokens = pairs // max(top_k, 1)
    weights = topk_weights.reshape(-1)[pairs].unsqueeze(1)
    bounds = offsets.tolist()
    total = torch.zeros(x.shape) if addend is None else addend.to(torch.float32, copy=True)
    for expert in range(num_experts):
        first, last = bounds[expert], bounds[expert + 1]
        if first == last:
            continue
        token = tokens[first:last]
        hidden = _product(x[token], w13[expert], None if w13_bias is None else w13_bias[expert], activation_format)
        activated = _gated(hidden, gate).to(x.dtype)
        result = _product(activated, w2[expert], None if w2_bias is None else w2_bias[expert], activation_format)
        total.index_add_(0, token, result.mul_(weights[first:last]))
    return total.to(x.dtype) if out is None else out.copy_(total)


def _product(
    rows: torch.Tensor, weight: torch.Tensor | QuantizedTensor, bias: torch.Tensor | None, activation_format: str | None
) -> torch.Tensor:
    """The product in float32, of rows as they are or rounded to a format."""
    if activation_format is None:
        return mm(rows, weight, bias, out_dtype=torch.float32)
    return mm(quantize(rows, activation_format), weight, None if bias is None else bias.float(), out_dtype=torch.float32)


def _gated(hidden: torch.Tensor, gate: GatedActivation) -> torch.Tensor:
    if gate.kind != "swiglu":
        return gelu_and_mul(hidden, approximate="tanh" if gate.kind == "gelu_tanh" else "none")
    if gate.clamped:
        return swiglu_clamped(hidden, gate.limit, alpha=gate.alpha, up_offset=gate.up_offset)
    return silu_and_mul(hidden)
