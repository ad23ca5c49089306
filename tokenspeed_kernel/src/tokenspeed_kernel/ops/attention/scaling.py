"""Scales around attention, for kernels that read an fp8 cache's numbers as they stand.

A stored key times its scale is the key, and q'(s k) = (s q)'k: scaling the queries before, and the outputs after, takes the place
of scaling every key and value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tokenspeed_kernel.ops.attention.plan import AttentionPlan

__all__ = ["by_query_head", "decode_through", "extend_through", "scale_outputs", "scaled_queries"]

Attended = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def by_query_head(scale: torch.Tensor, num_heads: int) -> torch.Tensor:
    """For each query head the scale of its key head, [num_heads, 1], or the one scale, []."""
    return scale if scale.dim() == 0 else scale.repeat_interleave(num_heads // scale.shape[0])[:, None]


def scaled_queries(q: torch.Tensor, k_scale: torch.Tensor) -> torch.Tensor:
    """Queries [rows, num_heads, head_dim] times the scales of their keys, rounded once to q's dtype."""
    # In float32: PyTorch would round a scale of no dimension to q's dtype first.
    return (q.to(torch.float32) * by_query_head(k_scale, q.shape[1])).to(q.dtype)


def scale_outputs(attended: Attended, v_scale: torch.Tensor) -> Attended:
    """Multiply outputs [rows, num_heads, head_dim] by the scales of their values, in place; the LSE stays as it is."""
    result = attended[0] if isinstance(attended, tuple) else attended
    result.copy_(result.to(torch.float32) * by_query_head(v_scale, result.shape[1]))
    return attended


def extend_through(mha_extend: Callable[..., Attended]) -> Callable[..., Attended]:
    """Return the implementation of `mha_extend_scaled` around that of `mha_extend`, which must take fp8 caches."""

    def mha_extend_scaled(
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        page_table: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        seq_lens: torch.Tensor,
        k_scale: torch.Tensor,
        v_scale: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        softmax_scale: float | None = None,
        causal: bool = True,
        sliding_window: int | None = None,
        logit_cap: float | None = None,
        sinks: torch.Tensor | None = None,
        return_lse: bool = False,
        out: torch.Tensor | None = None,
        plan: AttentionPlan | None = None,
    ) -> Attended:
        options: dict[str, Any] = {
            "max_seqlen_q": max_seqlen_q,
            "max_seqlen_k": max_seqlen_k,
            "softmax_scale": softmax_scale,
            "causal": causal,
            "sliding_window": sliding_window,
            "logit_cap": logit_cap,
            "sinks": sinks,
            "return_lse": return_lse,
            "out": out,
            "plan": plan,
        }
        scaled = scaled_queries(q, k_scale)
        return scale_outputs(mha_extend(scaled, k_cache, v_cache, page_table, cu_seqlens_q, seq_lens, **options), v_scale)

    return mha_extend_scaled


def decode_through(mha_decode: Callable[..., Attended]) -> Callable[..., Attended]:
    """Return the implementation of `mha_decode_scaled` around that of `mha_decode`, which must take fp8 caches."""

    def mha_decode_scaled(
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        page_table: torch.Tensor,
        seq_lens: torch.Tensor,
        k_scale: torch.Tensor,
        v_scale: torch.Tensor,
        max_seqlen_k: int,
        softmax_scale: float | None = None,
        sliding_window: int | None = None,
        logit_cap: float | None = None,
        sinks: torch.Tensor | None = None,
        return_lse: bool = False,
        out: torch.Tensor | None = None,
        plan: AttentionPlan | None = None,
    ) -> Attended:
        options = (max_seqlen_k, softmax_scale, sliding_window, logit_cap, sinks, return_lse, out, plan)
        attended = mha_decode(scaled_queries(q, k_scale), k_cache, v_cache, page_table, seq_lens, *options)
        return scale_outputs(attended, v_scale)

    return mha_decode_scaled
