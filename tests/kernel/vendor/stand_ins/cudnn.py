"""cuDNN's attention under PyTorch's operator, which checks its own signature."""

from __future__ import annotations

import math
from typing import Any

import torch

from .common import attend

_HEAD_DIMS = (64, 128)


def scaled_dot_product_cudnn_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: torch.Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """[batch, heads, tokens, dim]; the mask starts at the first key; NaN where nothing is defined. The LSE has base e."""
    assert attn_bias is None and dropout_p == 0 and not return_debug_mask and scale is not None
    assert query.dtype in (torch.float16, torch.bfloat16) and query.shape[-1] in _HEAD_DIMS and query.stride(-1) == 1
    assert key.shape == value.shape and query.shape[1] % key.shape[1] == 0
    batch, num_heads, num_queries, _ = query.shape
    num_keys = key.shape[2]
    assert num_queries and num_keys, "the library refuses empty operands"
    out = torch.empty_like(query)
    lse = torch.empty(batch, num_heads, num_queries, 1)
    for index in range(batch):
        q, k, v = (operand[index].transpose(0, 1) for operand in (query, key, value))
        if is_causal:  # query i sees keys 0 to i
            padded = max(num_queries, num_keys)
            q = torch.cat([q, q.new_zeros(padded - num_queries, *q.shape[1:])])
            k, v = (torch.cat([operand, operand.new_zeros(padded - num_keys, *operand.shape[1:])]) for operand in (k, v))
        result, result_lse = attend(q, k, v, scale, is_causal, 0.0)
        out[index] = result[:num_queries].transpose(0, 1).to(out.dtype)
        lse[index, :, :, 0] = result_lse[:num_queries].transpose(0, 1) * math.log(2)
    nothing = torch.empty(0)
    return out, lse if compute_log_sumexp else nothing, nothing, nothing, num_queries, num_keys, nothing, nothing, nothing
