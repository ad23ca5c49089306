"""Public op: attention of each request's new queries to its paged cache. What all share is in `api`."""

from __future__ import annotations

from typing import Final, Literal, overload

import torch
from torch.compiler import is_compiling

from tokenspeed_kernel.dispatch import NEW_CALL, BoundOp
from tokenspeed_kernel.ops.attention import library
from tokenspeed_kernel.ops.attention.check import check_int32, check_operands, check_options, check_paged
from tokenspeed_kernel.ops.attention.contract import MHA_EXTEND
from tokenspeed_kernel.ops.attention.plan import AttentionPlan
from tokenspeed_kernel.ops.operands import OPERAND_ERRORS, refuse_kinds

__all__ = ["mha_extend"]

_EXTEND: Final = BoundOp(MHA_EXTEND)


@overload
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
    return_lse: Literal[False] = False,
    out: torch.Tensor | None = None,
    plan: AttentionPlan | None = None,
    solution: str | None = None,
) -> torch.Tensor: ...
@overload
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
    return_lse: Literal[True],
    out: torch.Tensor | None = None,
    plan: AttentionPlan | None = None,
    solution: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...
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
    solution: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attend each request's new queries to its paged cache, which already holds the new tokens' keys and values.

    Single-token decode rows and prefill chunks may be mixed in one batch.

    Args:
        q: [num_tokens, num_heads, head_dim] fp32, fp16, bf16 (fp64 on the CPU), last dimension contiguous.
        k_cache: [num_pages, page_size, num_kv_heads, head_dim] of q's dtype; num_kv_heads divides num_heads.
        v_cache: as k_cache.
        page_table: [num_reqs, max_pages] int32, page indices; keys on pages outside 0..num_pages-1 (-1, say) are masked.
        cu_seqlens_q: [num_reqs + 1] int32, request r's queries are rows [cu[r], cu[r + 1]); from 0 to num_tokens.
        seq_lens: [num_reqs] int32, tokens in the cache including the new ones.
        max_seqlen_q: int, at least every request's number of queries.
        max_seqlen_k: int, at least every entry of seq_lens; at most max_pages * page_size.
        softmax_scale: float, dimensionless; head_dim ** -0.5 when None.
        causal: a query sees no key at a later position than its own.
        sliding_window: int, keys that a query sees, its own included; None for all. Needs causal.
        logit_cap: float, bound of the logits' soft cap; None for none.
        sinks: optional [num_heads] floating point, one more logit in each head's denominator.
        return_lse: also return the log of the denominator, which includes the sink.
        out: optional, like q, last dimension contiguous, written in place; it must not overlap an input.
        plan: what `plan` made of the same tensors; saves every layer but the first the preparation. The compiled form of the
            op has no plan: it is left out while compiling.
        solution: solution or kernel to use instead of the best that qualifies.
    Returns:
        out, or a new tensor of q's shape and dtype; with return_lse also [rows of q, num_heads] float32, base e.
    Raises:
        ShapeError: shapes, dtypes, strides or options disagree.  NoKernelError: nothing qualifies.
    Source: arXiv:1706.03762, section 3.2; paging arXiv:2309.06180; grouped queries arXiv:2305.13245.
    """
    if is_compiling():
        result, lse = _EXTEND_LIBRARY(
            q,
            k_cache,
            v_cache,
            page_table,
            cu_seqlens_q,
            seq_lens,
            max_seqlen_q,
            max_seqlen_k,
            softmax_scale,
            causal,
            sliding_window,
            logit_cap,
            sinks,
            return_lse,
            solution,
        )
        result = result if out is None else out.copy_(result)
        return (result, lse) if return_lse else result
    try:
        planned: tuple[int, torch.device] | None = None
        operands: tuple[torch.Tensor, ...] = (q, k_cache, v_cache)
        if plan is None:
            operands += (page_table, cu_seqlens_q, seq_lens)
        else:
            planned = (plan.page_size, plan.device)
        if sinks is not None:
            operands += (sinks,)
        if out is not None:
            operands += (out,)
        key = (q.shape, planned, causal, sliding_window, logit_cap, sinks is None, return_lse, out is None, solution)
        looks_same, kernel = _EXTEND.seen.get(key, NEW_CALL)
        if not looks_same(*operands) or (
            page_table.shape[1] * k_cache.shape[1] < max_seqlen_k
            if plan is None
            else plan.page_table is not page_table
            or plan.seq_lens is not seq_lens
            or plan.cu_seqlens_q is not cu_seqlens_q
            or plan.max_keys < max_seqlen_k
        ):
            shape, cache_shape, dtype, cache_dtype, device = q.shape, k_cache.shape, q.dtype, k_cache.dtype, q.device
            if (
                len(shape) != 3
                or len(cache_shape) != 4
                or v_cache.shape != cache_shape
                or cache_shape[3] != shape[2]
                or not cache_shape[2]
                or shape[1] % cache_shape[2]
                or v_cache.dtype != cache_dtype
                or q.stride()[2] != 1
                or k_cache.stride()[3] != 1
                or v_cache.stride()[3] != 1
                or k_cache.device != device
                or v_cache.device != device
            ):
                check_operands("attention.mha_extend", q, k_cache, v_cache, 4)
            if sliding_window is not None or logit_cap is not None or sinks is not None or out is not None:
                check_options("attention.mha_extend", q, sliding_window, causal, logit_cap, sinks, out)
            page_size = cache_shape[1]
            if (
                plan is None
                or plan.cu_seqlens_q is not cu_seqlens_q
                or not plan.is_of(page_table, seq_lens, page_size, max_seqlen_k, device)
            ):
                check_paged("attention.mha_extend", q, page_size, page_table, seq_lens, max_seqlen_k, plan, cu_seqlens_q)
                check_int32("attention.mha_extend", "cu_seqlens_q", cu_seqlens_q, seq_lens.shape[0] + 1, q)
            window, cap, sink = sliding_window is not None, logit_cap is not None, sinks is not None
            traits = (shape[2], page_size, causal, window, cap, sink, return_lse)
            kernel = _EXTEND.kernel(device, (dtype, cache_dtype, cache_dtype), traits, solution)
            _EXTEND.remember(key, kernel, *operands)
        attended: torch.Tensor | tuple[torch.Tensor, torch.Tensor] = kernel(
            q,
            k_cache,
            v_cache,
            page_table,
            cu_seqlens_q,
            seq_lens,
            max_seqlen_q,
            max_seqlen_k,
            softmax_scale,
            causal,
            sliding_window,
            logit_cap,
            sinks,
            return_lse,
            out,
            plan,
        )
        return attended
    except OPERAND_ERRORS as error:
        refuse_kinds(mha_extend, locals(), error)
        raise


_EXTEND_LIBRARY: Final = library.register("mha_extend", mha_extend)
