"""Decode attention over float32 pages; see `tokenspeed_kernel.ops.attention` for the contract."""

from __future__ import annotations

from typing import Any

import torch
from torch import get_num_threads

from tokenspeed_kernel import ShapeError
from tokenspeed_kernel_cpu import _kernels


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
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attend each request's newest query to its paged cache, which is read where it lies: there is nothing to plan.

    Raises:
        ShapeError: a length is beyond what the page table has room for; nothing is written.
    """
    rows, num_heads, head_dim = q.shape
    num_pages, page_size, num_kv_heads, _ = k_cache.shape
    if out is None:
        out = torch.empty((rows, num_heads, head_dim), dtype=torch.float32, device="cpu")
    lse = torch.empty((rows, num_heads), dtype=torch.float32, device="cpu") if return_lse else None
    if sinks is not None:
        sinks = sinks.to(torch.float32).contiguous()
    q_row, q_head, _ = q.stride()
    k_page, k_token, k_head, _ = k_cache.stride()
    v_page, v_token, v_head, _ = v_cache.stride()
    out_row, out_head, _ = out.stride()
    table_row, table_column = page_table.stride()
    max_pages = page_table.shape[1]
    longest = _kernels.mha_decode(
        q.data_ptr(), q_row, q_head, k_cache.data_ptr(), k_page, k_token, k_head,
        v_cache.data_ptr(), v_page, v_token, v_head, out.data_ptr(), out_row, out_head,
        page_table.data_ptr(), table_row, table_column, max_pages, seq_lens.data_ptr(), seq_lens.stride(0),
        rows, num_heads, num_kv_heads, head_dim, num_pages, page_size,
        head_dim**-0.5 if softmax_scale is None else softmax_scale, sliding_window or 0, logit_cap or 0.0,
        0 if sinks is None else sinks.data_ptr(), 0 if lse is None else lse.data_ptr(), get_num_threads(),
    )  # fmt: skip
    if longest > max_pages * page_size:
        raise ShapeError(
            "attention.mha_decode",
            expected=f"seq_lens <= max_pages * page_size = {max_pages * page_size}",
            got=str(longest),
            fix="give the page table a column for every page of the longest request",
        )
    return out if lse is None else (out, lse)
