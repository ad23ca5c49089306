"""Attention on the CPU with PyTorch's batched products; see the public ops for the contracts."""

from __future__ import annotations

import torch

from tokenspeed_kernel.ops.attention.cpu.compute import attend
from tokenspeed_kernel.ops.attention.cpu.schedule import (
    Schedule,
    Shape,
    check_lengths,
    paged_schedule,
    ragged_schedule,
)
from tokenspeed_kernel.ops.attention.plan import AttentionPlan


def mha_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = True,
    sliding_window: int | None = None,
    logit_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attend ragged queries to ragged keys."""
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    check_lengths("attention.mha_prefill", starts_q, q.shape[0], "cu_seqlens_q")
    check_lengths("attention.mha_prefill", starts_k, k.shape[0], "cu_seqlens_k")
    schedule = ragged_schedule(starts_q, starts_k, Shape(0, q.shape[1], k.shape[1], causal, sliding_window))
    return attend(
        schedule,
        q,
        k,
        v,
        softmax_scale=softmax_scale,
        logit_cap=logit_cap,
        sinks=sinks,
        return_lse=return_lse,
        out=out,
    )


def mha_extend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
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
    """Attend each request's new queries to its paged cache."""

    def build() -> Schedule:
        starts = cu_seqlens_q.tolist()
        check_lengths("attention.mha_extend", starts, q.shape[0], "cu_seqlens_q")
        shape = Shape(num_pages, num_heads, num_kv_heads, causal, sliding_window)
        return paged_schedule("attention.mha_extend", page_table.numpy(), starts, seq_lens.tolist(), page_size, shape)

    num_pages, page_size, num_kv_heads, _ = k_cache.shape
    num_heads = q.shape[1]
    key = ("cpu_mha_extend", num_pages, num_heads, num_kv_heads, causal, sliding_window)
    schedule = build() if plan is None else plan.prepared(key, build)
    return attend(
        schedule,
        q,
        k_cache,
        v_cache,
        softmax_scale=softmax_scale,
        logit_cap=logit_cap,
        sinks=sinks,
        return_lse=return_lse,
        out=out,
    )


def mha_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    sliding_window: int | None = None,
    logit_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    plan: AttentionPlan | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attend each request's newest query to its paged cache."""

    def build() -> Schedule:
        starts = list(range(q.shape[0] + 1))
        shape = Shape(num_pages, num_heads, num_kv_heads, True, sliding_window)
        return paged_schedule("attention.mha_decode", page_table.numpy(), starts, seq_lens.tolist(), page_size, shape)

    num_pages, page_size, num_kv_heads, _ = k_cache.shape
    num_heads = q.shape[1]
    key = ("cpu_mha_decode", num_pages, num_heads, num_kv_heads, sliding_window)
    schedule = build() if plan is None else plan.prepared(key, build)
    return attend(
        schedule,
        q,
        k_cache,
        v_cache,
        softmax_scale=softmax_scale,
        logit_cap=logit_cap,
        sinks=sinks,
        return_lse=return_lse,
        out=out,
    )
