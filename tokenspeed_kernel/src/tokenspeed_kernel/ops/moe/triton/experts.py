"""Experts in Triton: pairs that stream weights where they are few, sorted rows on the matrix units where they are many."""

from __future__ import annotations

import functools

import torch

from tokenspeed_kernel.ops.moe.gate import GatedActivation
from tokenspeed_kernel.ops.moe.triton import few_tokens, many_tokens
from tokenspeed_kernel.ops.moe.triton.permute import sum_pairs, weighted_sum
from tokenspeed_kernel.ops.moe.triton.rows import Rows, describe_rows
from tokenspeed_kernel.ops.moe.triton.sort import sort_pairs
from tokenspeed_kernel.ops.moe.triton.tuning import many_tiles, streams_pairs
from tokenspeed_kernel.ops.moe.triton.weights import describe
from tokenspeed_kernel.ops.quantization.triton.quantize import quantize
from tokenspeed_kernel.quantized import QuantizedTensor
from tokenspeed_kernel.signature import Format

__all__ = ["fused_experts"]

_PLAIN_GATE = GatedActivation()


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
    """See `tokenspeed_kernel.ops.moe.fused_experts`."""
    gate = activation or _PLAIN_GATE
    num_tokens, top_k = topk_ids.shape
    num_experts, hidden, inner = w2.shape
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    if top_k == 0:
        return out.zero_() if addend is None else out.copy_(addend)
    shape = (num_experts, hidden, inner)
    first, second = describe(w13), describe(w2)
    rows = _rows(x, activation_format)
    if streams_pairs(num_tokens, top_k):
        values = few_tokens.first_product(rows, x.dtype, first, topk_ids, shape, w13_bias, gate, first_expert)
        results = few_tokens.second_product(_rows(values, activation_format), second, topk_ids, shape, w2_bias, first_expert)
        return sum_pairs(results, topk_ids, topk_weights, addend, out, num_experts, first_expert)
    order = sort_pairs(topk_ids, num_experts, first_expert)
    amd = torch.version.hip is not None
    pairs, quantized = num_tokens * top_k, isinstance(w13, QuantizedTensor)
    # Rows in fp8 are multiplied on the matrix units whatever they were before.
    dtype = x.dtype if activation_format is None else torch.bfloat16
    tiles = many_tiles(pairs, num_experts, dtype, first.constants["SCALE_COLS"], quantized=quantized, matrices=2, amd=amd)
    values = many_tokens.first_product(rows, x.dtype, first, order, shape, w13_bias, gate, tiles)
    quantized = isinstance(w2, QuantizedTensor)
    tiles = many_tiles(pairs, num_experts, dtype, second.constants["SCALE_COLS"], quantized=quantized, matrices=1, amd=amd)
    results = many_tokens.second_product(_rows(values, activation_format), x.dtype, second, order, shape, w2_bias, tiles)
    return weighted_sum(results, order.row_of_pair, topk_weights, addend, out)


def _rows(values: torch.Tensor, activation_format: str | None) -> Rows:
    """Rows of a product, rounded to the format. What a row that no pair fills holds stays in that row."""
    return describe_rows(values if activation_format is None else quantize(values, _parsed(activation_format)))


@functools.cache
def _parsed(text: str) -> Format:
    return Format.parse(text)
