"""The truth of attention to fp8 caches with scales: as in `reference`, over values times their scales in float64."""

from __future__ import annotations

import torch

from tokenspeed_kernel.ops.attention import reference
from tokenspeed_kernel.ops.attention.plan import AttentionPlan
from tokenspeed_kernel.ops.attention.scaling import scaled_queries


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
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attend each request's new queries; that the product of queries and scales is rounded to q's dtype is in the contract."""
    return reference.mha_extend(
        scaled_queries(q, k_scale),
        k_cache.to(torch.float64),
        v_cache.to(torch.float64) * (v_scale if v_scale.dim() == 0 else v_scale[:, None]),
        page_table,
        cu_seqlens_q,
        seq_lens,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        softmax_scale=softmax_scale,
        causal=causal,
        sliding_window=sliding_window,
        logit_cap=logit_cap,
        sinks=sinks,
        return_lse=return_lse,
        out=out,
    )


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
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attend each request's newest query."""
    return mha_extend_scaled(
        q,
        k_cache,
        v_cache,
        page_table,
        torch.arange(q.shape[0] + 1, dtype=torch.int32),
        seq_lens,
        k_scale,
        v_scale,
        1,
        max_seqlen_k,
        softmax_scale,
        sliding_window=sliding_window,
        logit_cap=logit_cap,
        sinks=sinks,
        return_lse=return_lse,
        out=out,
    )
