"""Public op: attention of each request's newest query to its paged cache. What all share is in `api`."""

from __future__ import annotations

from typing import Final, Literal, overload

import torch
from torch.compiler import is_compiling

from tokenspeed_kernel.dispatch import BoundOp
from tokenspeed_kernel.ops.attention import library
from tokenspeed_kernel.ops.attention.check import check_int32, check_operands, check_options, check_paged
from tokenspeed_kernel.ops.attention.contract import MHA_DECODE
from tokenspeed_kernel.ops.attention.plan import AttentionPlan

__all__ = ["mha_decode"]

_DECODE: Final = BoundOp(MHA_DECODE)
_DECODE_TABLE: Final = _DECODE.table
_INT32: Final = torch.int32


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
    cache_shape, dtype, cache_dtype = k_cache.shape, q.dtype, k_cache.dtype
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
    # Ordinals of devices rather than devices: they are quicker to read, to compare and to hash. The host's and a meta tensor's are
    # the same; kernels of the host refuse what has no memory.
    ordinal, k_ordinal, v_ordinal = q.get_device(), k_cache.get_device(), v_cache.get_device()
    # `plan.is_of`, without the call.
    if (
        plan is None
        or page_table is not plan.page_table
        or seq_lens is not plan.seq_lens
        or page_size != plan.page_size
        or max_seqlen_k > plan.max_keys
        or plan.num_reqs != num_reqs
        or plan.device != q.device
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
            or page_table.get_device() != ordinal
            or seq_lens.get_device() != ordinal
        ):
            check_paged("attention.mha_decode", q, page_size, page_table, seq_lens, max_seqlen_k, plan)
            check_int32("attention.mha_decode", "seq_lens", seq_lens, num_reqs, q)
    other_dtype = None if cache_dtype is dtype else cache_dtype  # hashing a dtype is slow
    key = (ordinal, k_ordinal, v_ordinal, dtype, other_dtype, head_dim, page_size, options, solution)
    try:
        kernel = _DECODE_TABLE[key]
    except KeyError:
        check_operands("attention.mha_decode", q, k_cache, v_cache, 4)  # their devices are in the key
        traits = (head_dim, page_size, *(options or (False, False, False, False)))
        kernel = _DECODE.bind(key, q.device, (dtype, cache_dtype, cache_dtype), traits, solution)
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


_DECODE_LIBRARY: Final = library.register("mha_decode", mha_decode)
