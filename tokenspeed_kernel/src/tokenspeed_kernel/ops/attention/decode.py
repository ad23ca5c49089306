"""Public op: attention of each request's newest query to its paged cache. What all share is in `api`."""

from __future__ import annotations

from typing import Final, Literal, overload

import torch
from torch.compiler import is_compiling

from tokenspeed_kernel.dispatch import NEW_CALL, BoundOp
from tokenspeed_kernel.ops.attention import library
from tokenspeed_kernel.ops.attention.check import check_int32, check_operands, check_options, check_paged
from tokenspeed_kernel.ops.attention.contract import MHA_DECODE
from tokenspeed_kernel.ops.attention.plan import AttentionPlan
from tokenspeed_kernel.ops.operands import OPERAND_ERRORS, refuse_kinds

__all__ = ["mha_decode"]

_DECODE: Final = BoundOp(MHA_DECODE)
_SEEN: Final = _DECODE.seen


@overload
def mha_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    sliding_window: int | None = None,
    logit_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    return_lse: Literal[False] = False,
    out: torch.Tensor | None = None,
    plan: AttentionPlan | None = None,
    solution: str | None = None,
) -> torch.Tensor: ...
@overload
def mha_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    sliding_window: int | None = None,
    logit_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    return_lse: Literal[True],
    out: torch.Tensor | None = None,
    plan: AttentionPlan | None = None,
    solution: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...
def mha_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    sliding_window: int | None = None,
    logit_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    plan: AttentionPlan | None = None,
    solution: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attend each request's newest query to its paged cache, which already holds the new token's key and value.

    Args:
        q: [num_reqs, num_heads, head_dim] fp32, fp16, bf16 (fp64 on the CPU), last dimension contiguous.
        k_cache: [num_pages, page_size, num_kv_heads, head_dim] of q's dtype; num_kv_heads divides num_heads.
        v_cache: as k_cache.
        page_table: [num_reqs, max_pages] int32, page indices; keys on pages outside 0..num_pages-1 (-1, say) are masked.
        seq_lens: [num_reqs] int32, tokens in the cache including the new one.
        max_seqlen_k: int, at least every entry of seq_lens; at most max_pages * page_size.
        softmax_scale: float, dimensionless; head_dim ** -0.5 when None.
        sliding_window: int, keys that a query sees, its own included; None for all.
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
    Source: arXiv:1706.03762, section 3.2; paging arXiv:2309.06180; split keys arXiv:2311.01282.
    """
    if is_compiling():
        result, lse = _DECODE_LIBRARY(
            q,
            k_cache,
            v_cache,
            page_table,
            seq_lens,
            max_seqlen_k,
            softmax_scale,
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
            operands += (page_table, seq_lens)
        else:
            planned = (plan.page_size, plan.device)
        if sinks is not None:
            operands += (sinks,)
        if out is not None:
            operands += (out,)
        key = (q.shape, planned, sliding_window, logit_cap, sinks is None, return_lse, out is None, solution)
        looks_same, kernel = _SEEN.get(key, NEW_CALL)
        if not looks_same(*operands) or (
            page_table.shape[1] * k_cache.shape[1] < max_seqlen_k
            if plan is None
            else plan.page_table is not page_table
            or plan.seq_lens is not seq_lens
            or plan.num_reqs != q.shape[0]
            or plan.max_keys < max_seqlen_k
        ):
            op = MHA_DECODE.name
            check_operands(op, q, k_cache, v_cache, 4)
            check_options(op, q, sliding_window, True, logit_cap, sinks, out)
            (num_reqs, _, head_dim), page_size = q.shape, k_cache.shape[1]
            check_paged(op, q, page_size, page_table, seq_lens, max_seqlen_k, plan)
            check_int32(op, "seq_lens", seq_lens, num_reqs, q)
            limits = (sliding_window is not None, logit_cap is not None, sinks is not None)
            dtypes = (q.dtype, k_cache.dtype, k_cache.dtype)
            kernel = _DECODE.kernel(q.device, dtypes, (head_dim, page_size, *limits, return_lse), solution)
            _DECODE.remember(key, kernel, *operands)
        attended: torch.Tensor | tuple[torch.Tensor, torch.Tensor] = kernel(
            q,
            k_cache,
            v_cache,
            page_table,
            seq_lens,
            max_seqlen_k,
            softmax_scale,
            sliding_window,
            logit_cap,
            sinks,
            return_lse,
            out,
            plan,
        )
        return attended
    except OPERAND_ERRORS as error:
        refuse_kinds(mha_decode, locals(), error)
        raise


_DECODE_LIBRARY: Final = library.register("mha_decode", mha_decode)
