"""Public ops: attention to fp8 caches with scales, as `kvcache.write_scaled_kv` writes them."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.compiler import is_compiling

from tokenspeed_kernel.dispatch import NEW_CALL, BoundOp
from tokenspeed_kernel.errors import ShapeError
from tokenspeed_kernel.ops.attention import library
from tokenspeed_kernel.ops.attention.check import check_int32, check_operands, check_options, check_paged
from tokenspeed_kernel.ops.attention.contract import MHA_DECODE_SCALED, MHA_EXTEND_SCALED
from tokenspeed_kernel.ops.attention.plan import AttentionPlan
from tokenspeed_kernel.ops.operands import OPERAND_ERRORS, refuse_kinds
from tokenspeed_kernel.signature import Format

__all__ = ["mha_decode_scaled", "mha_extend_scaled"]

Attended = torch.Tensor | tuple[torch.Tensor, torch.Tensor]

_EXTEND: Final = BoundOp(MHA_EXTEND_SCALED)
_DECODE: Final = BoundOp(MHA_DECODE_SCALED)
_FP8: Final = torch.float8_e4m3fn
_BY_TENSOR: Final = Format.parse("fp8_e4m3@tensor")
_BY_HEAD: Final = Format.parse("fp8_e4m3@head")


def mha_decode_scaled(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
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
    """`mha_decode` to an fp8 cache, as `kvcache.write_scaled_kv` writes it.

    Args:
        q: [num_reqs, num_heads, head_dim] fp32, fp16 or bf16, last dimension contiguous; its product with the scale is rounded to
            this dtype.
        k_cache: [num_pages, page_size, num_kv_heads, head_dim] float8_e4m3fn, last dimension contiguous.
        v_cache: as k_cache.
        page_table: as in `mha_decode`.
        seq_lens: as in `mha_decode`.
        k_scale: [] or [num_kv_heads] fp32, what a stored key is multiplied by to give its value.
        v_scale: [] or [num_kv_heads] fp32, the same for values.
        max_seqlen_k: as in `mha_decode`, and so are softmax_scale, sliding_window, logit_cap, sinks, return_lse, out and plan.
        solution: solution or kernel to use instead of the best that qualifies.
    Returns:
        As `mha_decode`; the LSE is that of the scaled keys.
    Raises:
        ShapeError: shapes, dtypes, strides or options disagree.  NoKernelError: nothing qualifies.
    Source: FP8 Formats for Deep Learning, arXiv:2209.05433; attention as in `mha_decode`.
    """
    if is_compiling():
        inputs = (q, k_cache, v_cache, page_table, seq_lens, k_scale, v_scale, max_seqlen_k)
        result, lse = _DECODE_LIBRARY(*inputs, softmax_scale, sliding_window, logit_cap, sinks, return_lse, solution)
        result = result if out is None else out.copy_(result)
        return (result, lse) if return_lse else result
    try:
        planned: tuple[int, torch.device] | None = None
        operands: tuple[torch.Tensor, ...] = (q, k_cache, v_cache, k_scale, v_scale)
        if plan is None:
            operands += (page_table, seq_lens)
        else:
            planned = (plan.page_size, plan.device)
        if sinks is not None:
            operands += (sinks,)
        if out is not None:
            operands += (out,)
        key = (q.shape, planned, sliding_window, logit_cap, sinks is None, return_lse, out is None, solution)
        looks_same, kernel = _DECODE.seen.get(key, NEW_CALL)
        if not looks_same(*operands) or (
            page_table.shape[1] * k_cache.shape[1] < max_seqlen_k
            if plan is None
            else plan.page_table is not page_table
            or plan.seq_lens is not seq_lens
            or plan.num_reqs != q.shape[0]
            or plan.max_keys < max_seqlen_k
        ):
            op = MHA_DECODE_SCALED.name
            stored = _scaled_formats(op, q, k_cache, v_cache, k_scale, v_scale)
            check_options(op, q, sliding_window, True, logit_cap, sinks, out)
            page_size, head_dim = k_cache.shape[1], q.shape[2]
            check_paged(op, q, page_size, page_table, seq_lens, max_seqlen_k, plan)
            check_int32(op, "seq_lens", seq_lens, q.shape[0], q)
            traits = (head_dim, page_size, sliding_window is not None, logit_cap is not None, sinks is not None, return_lse)
            kernel = _DECODE.kernel(q.device, (q.dtype, *stored), traits, solution)
            _DECODE.remember(key, kernel, *operands)
        attended: Attended = kernel(
            q,
            k_cache,
            v_cache,
            page_table,
            seq_lens,
            k_scale,
            v_scale,
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
        refuse_kinds(mha_decode_scaled, locals(), error)
        raise


def mha_extend_scaled(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
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
    """`mha_extend` to an fp8 cache, as `kvcache.write_scaled_kv` writes it.

    Args:
        q: [num_tokens, num_heads, head_dim] fp32, fp16 or bf16, last dimension contiguous; its product with the scale is rounded
            to this dtype.
        k_cache: [num_pages, page_size, num_kv_heads, head_dim] float8_e4m3fn, last dimension contiguous.
        v_cache: as k_cache.
        page_table: as in `mha_extend`.
        cu_seqlens_q: as in `mha_extend`.
        seq_lens: as in `mha_extend`.
        k_scale: [] or [num_kv_heads] fp32, what a stored key is multiplied by to give its value.
        v_scale: [] or [num_kv_heads] fp32, the same for values.
        max_seqlen_q: as in `mha_extend`.
        max_seqlen_k: as in `mha_extend`, and so are softmax_scale, causal, sliding_window, logit_cap, sinks, return_lse, out
            and plan.
        solution: solution or kernel to use instead of the best that qualifies.
    Returns:
        As `mha_extend`; the LSE is that of the scaled keys.
    Raises:
        ShapeError: shapes, dtypes, strides or options disagree.  NoKernelError: nothing qualifies.
    Source: FP8 Formats for Deep Learning, arXiv:2209.05433; attention as in `mha_extend`.
    """
    if is_compiling():
        inputs = (q, k_cache, v_cache, page_table, cu_seqlens_q, seq_lens, k_scale, v_scale, max_seqlen_q, max_seqlen_k)
        options: tuple[Any, ...] = (softmax_scale, causal, sliding_window, logit_cap, sinks, return_lse, solution)
        result, lse = _EXTEND_LIBRARY(*inputs, *options)
        result = result if out is None else out.copy_(result)
        return (result, lse) if return_lse else result
    try:
        planned: tuple[int, torch.device] | None = None
        operands: tuple[torch.Tensor, ...] = (q, k_cache, v_cache, k_scale, v_scale)
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
            op = MHA_EXTEND_SCALED.name
            stored = _scaled_formats(op, q, k_cache, v_cache, k_scale, v_scale)
            check_options(op, q, sliding_window, causal, logit_cap, sinks, out)
            page_size, head_dim = k_cache.shape[1], q.shape[2]
            check_paged(op, q, page_size, page_table, seq_lens, max_seqlen_k, plan, cu_seqlens_q)
            check_int32(op, "cu_seqlens_q", cu_seqlens_q, seq_lens.shape[0] + 1, q)
            limits = (sliding_window is not None, logit_cap is not None, sinks is not None)
            kernel = _EXTEND.kernel(q.device, (q.dtype, *stored), (head_dim, page_size, causal, *limits, return_lse), solution)
            _EXTEND.remember(key, kernel, *operands)
        attended: Attended = kernel(
            q,
            k_cache,
            v_cache,
            page_table,
            cu_seqlens_q,
            seq_lens,
            k_scale,
            v_scale,
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
        refuse_kinds(mha_extend_scaled, locals(), error)
        raise


def _scaled_formats(
    op: str, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, k_scale: torch.Tensor, v_scale: torch.Tensor
) -> tuple[Format, Format]:
    """Formats of keys and values.

    Raises:
        ShapeError: the caches are not fp8 or do not fit q, or a scale is neither one for all heads nor one for each.
    """
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.dtype is not _FP8:
            fix = "leave the scales away for other caches"
            raise ShapeError(op, expected=f"{name} float8_e4m3fn", got=str(cache.dtype).removeprefix("torch."), fix=fix)
    check_operands(op, q, k_cache, v_cache, 4)
    heads = k_cache.shape[2]
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale.dtype is not torch.float32 or scale.device != k_cache.device or (scale.dim() and scale.shape != (heads,)):
            got = f"{list(scale.shape)} {str(scale.dtype).removeprefix('torch.')} on {scale.device}"
            fix = "give one scale for all heads, or one for each"
            raise ShapeError(op, expected=f"{name} [] or [{heads}] float32 on {k_cache.device}", got=got, fix=fix)
    return (_BY_HEAD if k_scale.dim() else _BY_TENSOR), (_BY_HEAD if v_scale.dim() else _BY_TENSOR)


_DECODE_LIBRARY: Final = library.register("mha_decode_scaled", mha_decode_scaled)
_EXTEND_LIBRARY: Final = library.register("mha_extend_scaled", mha_extend_scaled)
