"""Public attention ops: multi-head and grouped-query softmax attention over ragged and paged keys.

What all three share:

* Query head h reads key head h // (Hq / Hkv).
* Queries are aligned with the tail of their request: of n queries over L keys, query i stands at position L - n + i. With
  ``causal`` it sees no later key; queries at negative positions see none.
* ``sliding_window`` = W lets a query see its own position and the W - 1 before it.
* ``logit_cap`` = c replaces a logit x by c * tanh(x / c). ``sinks`` adds exp(sinks[h]) to head h's denominator and no value.
* The LSE is the natural logarithm of the denominator that the output was divided by, float32. It includes the sink: states of
  one row over parts of its keys merge by their LSEs if exactly one part was given the sink.
* A row that sees no key has output 0 and LSE -inf (with sinks: LSE = the sink, the only term that is left).
* Memory of keys that no row sees is never used in arithmetic: NaN there (unused pages, the tail of a page) does not spread.
"""

from __future__ import annotations

from typing import Final, Literal, overload

import torch
from torch.compiler import is_compiling

from tokenspeed_kernel.dispatch import BoundOp
from tokenspeed_kernel.ops.attention import library
from tokenspeed_kernel.ops.attention.check import check_int32, check_operands, check_options, check_paged
from tokenspeed_kernel.ops.attention.contract import MHA_DECODE, MHA_EXTEND, MHA_PREFILL
from tokenspeed_kernel.ops.attention.plan import AttentionPlan

_PREFILL: Final = BoundOp(MHA_PREFILL)
_EXTEND: Final = BoundOp(MHA_EXTEND)
_DECODE: Final = BoundOp(MHA_DECODE)
_DECODE_TABLE: Final = _DECODE.table
_INT32: Final = torch.int32

Attended = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


@overload
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
    return_lse: Literal[False] = False,
    out: torch.Tensor | None = None,
    solution: str | None = None,
) -> torch.Tensor: ...
@overload
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
    return_lse: Literal[True],
    out: torch.Tensor | None = None,
    solution: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...
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
    solution: str | None = None,
) -> Attended:
    """Attend ragged queries to ragged keys, one request after the other.

    Args:
        q: [num_tokens, num_heads, head_dim] fp32, fp16, bf16 (fp64 on the CPU), last dimension contiguous.
        k: [num_keys, num_kv_heads, head_dim] of q's dtype; num_kv_heads divides num_heads.
        v: as k.
        cu_seqlens_q: [num_reqs + 1] int32, request r's queries are rows [cu[r], cu[r + 1]); from 0 to num_tokens.
        cu_seqlens_k: [num_reqs + 1] int32, the same for its keys; from 0 to num_keys.
        max_seqlen_q: int, at least every request's number of queries.
        max_seqlen_k: int, at least every request's number of keys.
        softmax_scale: float, dimensionless; head_dim ** -0.5 when None.
        causal: a query sees no key at a later position than its own.
        sliding_window: int, keys that a query sees, its own included; None for all. Needs causal.
        logit_cap: float, bound of the logits' soft cap; None for none.
        sinks: optional [num_heads] floating point, one more logit in each head's denominator.
        return_lse: also return the log of the denominator, which includes the sink.
        out: optional, like q, last dimension contiguous, written in place; it must not overlap an input.
        solution: solution or kernel to use instead of the best that qualifies.
    Returns:
        out, or a new tensor of q's shape and dtype; with return_lse also [rows of q, num_heads] float32, base e.
    Raises:
        ShapeError: shapes, dtypes, strides or options disagree.  NoKernelError: nothing qualifies.
    Source: arXiv:1706.03762, section 3.2; online softmax and tiling arXiv:2205.14135.
    """
    if is_compiling():
        result, lse = _PREFILL_LIBRARY(
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k,
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
    shape, dtype, device = q.shape, k.dtype, q.device
    check_operands("attention.mha_prefill", q, k, v, 3)
    if sliding_window is not None or logit_cap is not None or sinks is not None or out is not None:
        check_options("attention.mha_prefill", q, sliding_window, causal, logit_cap, sinks, out)
    num_reqs = max(cu_seqlens_q.numel() - 1, 0)
    check_int32("attention.mha_prefill", "cu_seqlens_q", cu_seqlens_q, num_reqs + 1, q)
    check_int32("attention.mha_prefill", "cu_seqlens_k", cu_seqlens_k, num_reqs + 1, q)
    traits = (shape[2], causal, sliding_window is not None, logit_cap is not None, sinks is not None, return_lse)
    key = (device, q.dtype, dtype, *traits, solution)
    kernel = _PREFILL.table.get(key) or _PREFILL.bind(key, device, (q.dtype, dtype, dtype), traits, solution)
    attended: Attended = kernel(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
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
    return attended


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
) -> Attended:
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
    key = (device, dtype, cache_dtype, shape[2], page_size, causal, window, cap, sink, return_lse, solution)
    kernel = _EXTEND.table.get(key)
    if kernel is None:
        traits = (shape[2], page_size, causal, window, cap, sink, return_lse)
        kernel = _EXTEND.bind(key, device, (dtype, cache_dtype, cache_dtype), traits, solution)
    attended: Attended = kernel(
        q,
        k_cache,
        v_cache,
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
        plan=plan,
    )
    return attended


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
) -> Attended:
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
    cache_shape, dtype, cache_dtype, device = k_cache.shape, q.dtype, k_cache.dtype, q.device
    try:
        num_reqs, num_heads, head_dim = q.shape
        _, page_size, num_kv_heads, cache_dim = cache_shape
    except ValueError:
        check_operands("attention.mha_decode", q, k_cache, v_cache, 4)
        raise
    if (
        v_cache.shape != cache_shape
        or cache_dim != head_dim
        or not num_kv_heads
        or num_heads % num_kv_heads
        or v_cache.dtype is not cache_dtype
        or (not q.is_contiguous() and q.stride()[2] != 1)
        or (not k_cache.is_contiguous() and k_cache.stride()[3] != 1)
        or (not v_cache.is_contiguous() and v_cache.stride()[3] != 1)
    ):
        check_operands("attention.mha_decode", q, k_cache, v_cache, 4)
    options = None
    if sliding_window is not None or logit_cap is not None or sinks is not None or return_lse or out is not None:
        check_options("attention.mha_decode", q, sliding_window, True, logit_cap, sinks, out)
        options = (sliding_window is not None, logit_cap is not None, sinks is not None, return_lse)
    # Ordinals of devices rather than devices: they are quicker to compare and to hash.
    k_ordinal, v_ordinal = k_cache.get_device(), v_cache.get_device()
    # `plan.is_of`, without the call.
    if (
        plan is None
        or page_table is not plan.page_table
        or seq_lens is not plan.seq_lens
        or page_size != plan.page_size
        or max_seqlen_k > plan.max_keys
        or plan.num_reqs != num_reqs
        or plan.device != device
    ):
        try:
            num_rows, max_pages = page_table.shape
        except ValueError:
            num_rows = max_pages = -1
        if (
            plan is not None
            or num_rows != num_reqs
            or seq_lens.ndim != 1
            or seq_lens.numel() != num_reqs
            or max_pages * page_size < max_seqlen_k
            or page_table.dtype is not _INT32
            or seq_lens.dtype is not _INT32
            or page_table.get_device() != k_ordinal
            or seq_lens.get_device() != k_ordinal
        ):
            check_paged("attention.mha_decode", q, page_size, page_table, seq_lens, max_seqlen_k, plan)
            check_int32("attention.mha_decode", "seq_lens", seq_lens, num_reqs, q)
    other_dtype = None if cache_dtype is dtype else cache_dtype  # hashing a dtype is slow
    key = (device, k_ordinal, v_ordinal, dtype, other_dtype, head_dim, page_size, options, solution)
    try:
        kernel = _DECODE_TABLE[key]
    except KeyError:
        check_operands("attention.mha_decode", q, k_cache, v_cache, 4)  # their devices are in the key
        traits = (head_dim, page_size, *(options or (False, False, False, False)))
        kernel = _DECODE.bind(key, device, (dtype, cache_dtype, cache_dtype), traits, solution)
    attended: Attended = kernel(
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


_PREFILL_LIBRARY: Final = library.register("mha_prefill", mha_prefill)
_EXTEND_LIBRARY: Final = library.register("mha_extend", mha_extend)
_DECODE_LIBRARY: Final = library.register("mha_decode", mha_decode)
