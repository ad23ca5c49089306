"""Attention over pages or ragged keys, in C++; see `tokenspeed_kernel.ops.attention` for the contracts.

Keys and values are read where they lie: there is nothing to plan. A row's result depends on its own request alone, and is the same
bits whether it came by `mha_decode` or in a chunk of any size by `mha_extend`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import get_num_threads

from tokenspeed_kernel import ShapeError
from tokenspeed_kernel_cpu import _kernels
from tokenspeed_kernel_cpu.formats import NUMBERS

__all__ = ["mha_decode", "mha_extend", "mha_prefill"]

_Attended = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


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
    plan: Any = None,
) -> _Attended:
    """Attend each request's newest query to its paged cache.

    Raises:
        ShapeError: a length is beyond what the page table has room for; nothing is written.
    """
    options = (softmax_scale, True, sliding_window, logit_cap, sinks, return_lse, out)
    return _paged("attention.mha_decode", q, k_cache, v_cache, page_table, None, seq_lens, *options)


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
    plan: Any = None,
) -> _Attended:
    """Attend each request's new queries to its paged cache.

    Raises:
        ShapeError: as `mha_decode`, or the offsets do not rise from 0 to the number of queries; nothing is written.
    """
    options = (softmax_scale, causal, sliding_window, logit_cap, sinks, return_lse, out)
    return _paged("attention.mha_extend", q, k_cache, v_cache, page_table, cu_seqlens_q, seq_lens, *options)


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
) -> _Attended:
    """Attend ragged queries to ragged keys.

    Raises:
        ShapeError: offsets do not rise from 0 to the number of queries or keys; nothing is written.
    """
    rows, num_heads, head_dim = q.shape
    num_keys, num_kv_heads, _ = k.shape
    out, lse, sinks = _outputs(q, return_lse, out, sinks)
    q_row, q_head, _ = q.stride()
    k_token, k_head, _ = k.stride()
    v_token, v_head, _ = v.stride()
    out_row, out_head, _ = out.stride()
    wrong = _kernels.attend_ragged(
        q.data_ptr(), NUMBERS[q.dtype], q_row, q_head, k.data_ptr(), k_token, k_head, v.data_ptr(), v_token, v_head,
        out.data_ptr(), out_row, out_head, cu_seqlens_q.data_ptr(), cu_seqlens_q.stride(0), cu_seqlens_k.data_ptr(),
        cu_seqlens_k.stride(0), rows, num_keys, cu_seqlens_q.shape[0] - 1, num_heads, num_kv_heads, head_dim, causal,
        head_dim**-0.5 if softmax_scale is None else softmax_scale, sliding_window or 0, logit_cap or 0.0,
        0 if sinks is None else sinks.data_ptr(), 0 if lse is None else lse.data_ptr(), get_num_threads(),
    )  # fmt: skip
    if wrong:
        name, offsets, count = ("cu_seqlens_q", cu_seqlens_q, rows) if wrong == 1 else ("cu_seqlens_k", cu_seqlens_k, num_keys)
        raise _offset_error("attention.mha_prefill", name, offsets, count)
    return out if lse is None else (out, lse)


def _paged(
    op: str,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    seq_lens: torch.Tensor,
    softmax_scale: float | None,
    causal: bool,
    sliding_window: int | None,
    logit_cap: float | None,
    sinks: torch.Tensor | None,
    return_lse: bool,
    out: torch.Tensor | None,
) -> _Attended:
    rows, num_heads, head_dim = q.shape
    num_pages, page_size, num_kv_heads, _ = k_cache.shape
    out, lse, sinks = _outputs(q, return_lse, out, sinks)
    q_row, q_head, _ = q.stride()
    k_page, k_token, k_head, _ = k_cache.stride()
    v_page, v_token, v_head, _ = v_cache.stride()
    out_row, out_head, _ = out.stride()
    table_row, table_column = page_table.stride()
    max_pages = page_table.shape[1]
    starts, start_stride = (0, 0) if cu_seqlens_q is None else (cu_seqlens_q.data_ptr(), cu_seqlens_q.stride(0))
    longest = _kernels.attend_paged(
        q.data_ptr(), NUMBERS[q.dtype], q_row, q_head, k_cache.data_ptr(), NUMBERS[k_cache.dtype], k_page, k_token, k_head,
        v_cache.data_ptr(), v_page, v_token, v_head, out.data_ptr(), out_row, out_head,
        page_table.data_ptr(), table_row, table_column, max_pages, starts, start_stride, seq_lens.data_ptr(), seq_lens.stride(0),
        rows, seq_lens.shape[0], num_heads, num_kv_heads, head_dim, num_pages, page_size, causal,
        head_dim**-0.5 if softmax_scale is None else softmax_scale, sliding_window or 0, logit_cap or 0.0,
        0 if sinks is None else sinks.data_ptr(), 0 if lse is None else lse.data_ptr(), get_num_threads(),
    )  # fmt: skip
    if longest < 0:
        assert cu_seqlens_q is not None
        raise _offset_error(op, "cu_seqlens_q", cu_seqlens_q, rows)
    if longest > max_pages * page_size:
        raise ShapeError(
            op,
            expected=f"seq_lens <= max_pages * page_size = {max_pages * page_size}",
            got=str(longest),
            fix="give the page table a column for every page of the longest request",
        )
    return out if lse is None else (out, lse)


def _outputs(
    q: torch.Tensor, return_lse: bool, out: torch.Tensor | None, sinks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    if out is None:
        out = q.new_empty(*q.shape)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device="cpu") if return_lse else None
    return out, lse, None if sinks is None else sinks.to(torch.float32).contiguous()


def _offset_error(op: str, name: str, offsets: torch.Tensor, count: int) -> ShapeError:
    shown = offsets.tolist()
    shown = shown if len(shown) <= 8 else [*shown[:4], "...", *shown[-3:]]
    return ShapeError(op, expected=f"{name} rising from 0 to {count}", got=str(shown))
