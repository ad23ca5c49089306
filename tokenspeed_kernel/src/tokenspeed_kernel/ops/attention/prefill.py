"""Public op: attention of ragged queries to ragged keys. What all share is in `api`."""

from __future__ import annotations

from typing import Final, Literal, overload

import torch
from torch.compiler import is_compiling

from tokenspeed_kernel.dispatch import NEW_CALL, BoundOp
from tokenspeed_kernel.ops.attention import library
from tokenspeed_kernel.ops.attention.check import check_int32, check_operands, check_options
from tokenspeed_kernel.ops.attention.contract import MHA_PREFILL
from tokenspeed_kernel.ops.operands import OPERAND_ERRORS, refuse_kinds

__all__ = ["mha_prefill"]

_PREFILL: Final = BoundOp(MHA_PREFILL)


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
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
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
    try:
        operands: tuple[torch.Tensor, ...] = (q, k, v, cu_seqlens_q, cu_seqlens_k)
        if sinks is not None:
            operands += (sinks,)
        if out is not None:
            operands += (out,)
        key = (q.shape, causal, sliding_window, logit_cap, sinks is None, return_lse, out is None, solution)
        looks_same, kernel = _PREFILL.seen.get(key, NEW_CALL)
        if not looks_same(*operands):
            shape, dtype, device = q.shape, k.dtype, q.device
            check_operands("attention.mha_prefill", q, k, v, 3)
            if sliding_window is not None or logit_cap is not None or sinks is not None or out is not None:
                check_options("attention.mha_prefill", q, sliding_window, causal, logit_cap, sinks, out)
            num_reqs = max(cu_seqlens_q.numel() - 1, 0)
            check_int32("attention.mha_prefill", "cu_seqlens_q", cu_seqlens_q, num_reqs + 1, q)
            check_int32("attention.mha_prefill", "cu_seqlens_k", cu_seqlens_k, num_reqs + 1, q)
            traits = (shape[2], causal, sliding_window is not None, logit_cap is not None, sinks is not None, return_lse)
            kernel = _PREFILL.kernel(device, (q.dtype, dtype, dtype), traits, solution)
            _PREFILL.remember(key, kernel, *operands)
        attended: torch.Tensor | tuple[torch.Tensor, torch.Tensor] = kernel(
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
            out,
        )
        return attended
    except OPERAND_ERRORS as error:
        refuse_kinds(mha_prefill, locals(), error)
        raise


_PREFILL_LIBRARY: Final = library.register("mha_prefill", mha_prefill)
