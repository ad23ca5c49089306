"""Argument checks of the attention ops: one cheap test on the way through, a precise message when it fails."""

from __future__ import annotations

from typing import NoReturn

import torch

from tokenspeed_kernel.errors import ShapeError
from tokenspeed_kernel.ops.attention.plan import AttentionPlan


def check_operands(op: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, num_dims: int) -> None:
    """Check queries, and keys and values: ragged (3 dimensions) or paged (4), heads and elements last.

    Raises:
        ShapeError: with the operand, what was expected, and what came.
    """
    q_shape, k_shape = q.shape, k.shape
    if len(q_shape) != 3:
        _refuse(op, "q [num_tokens, num_heads, head_dim]", q)
    if len(k_shape) != num_dims:
        paged = "k_cache [num_pages, page_size, num_kv_heads, head_dim]"
        _refuse(op, paged if num_dims == 4 else "k [num_keys, num_kv_heads, head_dim]", k)
    if v.shape != k_shape or v.dtype != k.dtype or v.device != q.device or k.device != q.device:
        _refuse(op, f"v like k, {_shown(k)}, both on {q.device}", v)
    num_heads, num_kv_heads = q_shape[1], k_shape[-2]
    if k_shape[-1] != q_shape[2] or num_kv_heads == 0 or num_heads % num_kv_heads:
        _refuse(op, f"keys with head_dim={q_shape[2]} and a number of heads that divides {num_heads}", k)
    if q.stride(2) != 1:
        _refuse(op, "q with its last dimension contiguous", q, fix="pass q.contiguous()", strides=True)
    if k.stride(-1) != 1 or v.stride(-1) != 1:
        fix = "lay the keys and values out with head_dim innermost"
        _refuse(op, "keys and values with their last dimension contiguous", k, fix=fix, strides=True)


def check_options(
    op: str,
    q: torch.Tensor,
    sliding_window: int | None,
    causal: bool,
    logit_cap: float | None,
    sinks: torch.Tensor | None,
    out: torch.Tensor | None,
) -> None:
    """Check the options that are not off.

    Raises:
        ShapeError: with the option, what was expected, and what came.
    """
    if sliding_window is not None and (sliding_window < 1 or not causal):
        got = f"sliding_window={sliding_window}, causal={causal}"
        raise ShapeError(op, expected="sliding_window >= 1 with causal=True, or None", got=got)
    if logit_cap is not None and not logit_cap > 0:
        raise ShapeError(op, expected="logit_cap > 0, or None", got=str(logit_cap))
    num_heads = q.shape[1]
    if sinks is not None and (sinks.shape != (num_heads,) or sinks.device != q.device or not sinks.is_floating_point()):
        _refuse(op, f"sinks [{num_heads}] floating point on {q.device}", sinks)
    if out is not None and (out.shape != q.shape or out.dtype != q.dtype or out.device != q.device or out.stride(2) != 1):
        _refuse(op, f"out like q, {_shown(q)}, last dimension contiguous", out, strides=True)


def check_paged(
    op: str,
    q: torch.Tensor,
    page_size: int,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seqlen_k: int,
    plan: AttentionPlan | None,
    cu_seqlens_q: torch.Tensor | None = None,
) -> None:
    """Check a paged cache and its page table.

    Raises:
        ShapeError: with the operand, what was expected, and what came.
    """
    if plan is not None and not plan.describes(page_table, seq_lens, page_size, cu_seqlens_q):
        raise ShapeError(
            op,
            expected="the plan of this batch: made from the same page_table, seq_lens, cu_seqlens_q and page_size",
            got="a plan made from others",
            fix="make one plan for each step with attention.plan, and pass the same tensors to it and to the op",
        )
    if page_table.dim() != 2 or page_table.dtype != torch.int32 or page_table.device != q.device:
        _refuse(op, f"page_table [num_reqs, max_pages] int32 on {q.device}", page_table)
    num_reqs, max_pages = page_table.shape
    check_int32(op, "seq_lens", seq_lens, num_reqs, q)
    if max_seqlen_k > max_pages * page_size:
        raise ShapeError(
            op,
            expected=f"max_seqlen_k <= max_pages * page_size = {max_pages * page_size}",
            got=str(max_seqlen_k),
            fix="give the page table a column for every page of the longest request",
        )


def check_int32(op: str, name: str, tensor: torch.Tensor, size: int, q: torch.Tensor) -> None:
    """Check a vector of lengths or offsets.

    Raises:
        ShapeError: its shape, dtype or device is another.
    """
    if tensor.shape != (size,) or tensor.dtype != torch.int32 or tensor.device != q.device:
        _refuse(op, f"{name} [{size}] int32 on {q.device}", tensor)


def _refuse(op: str, expected: str, got: torch.Tensor, fix: str | None = None, strides: bool = False) -> NoReturn:
    raise ShapeError(op, expected=expected, got=_shown(got) + (f" strides {got.stride()}" if strides else ""), fix=fix)


def _shown(tensor: torch.Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"
