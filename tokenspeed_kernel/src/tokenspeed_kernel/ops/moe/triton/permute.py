"""Rows sorted by expert, and the weighted sum back, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenspeed_kernel.ops.moe.triton.sort import sort_pairs

__all__ = ["permute", "sum_pairs", "unpermute", "weighted_sum"]

_MAX_BLOCK = 1024


@triton.jit
def _gather_kernel(x_ptr, rows_ptr, pair_of_row_ptr, top_k, hidden, x_row, x_col, BLOCK: tl.constexpr):
    # Rows times their length can pass 2**31 elements.
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    inside = columns < hidden
    pair = tl.load(pair_of_row_ptr + row)
    token = tl.maximum(pair, 0).to(tl.int64) // top_k
    filled = columns < tl.where(pair >= 0, hidden, 0)
    values = tl.load(x_ptr + token * x_row + columns * x_col, mask=filled, other=0.0)
    tl.store(rows_ptr + row * hidden + columns, values, mask=inside)


@triton.jit
def _weighted_sum_kernel(
    rows_ptr, row_of_pair_ptr, weights_ptr, addend_ptr, out_ptr, first, num_rows, top_k, hidden,
    rows_row, rows_col, pairs_row, pairs_col, weights_row, weights_col, addend_row, addend_col, out_row, out_col,
    HAS_ADDEND: tl.constexpr, BY_PAIR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # row_of_pair holds rows or, BY_PAIR, expert ids of which those in [first, first + num_rows) count: then a pair is its own row.
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    inside = columns < hidden
    total = tl.zeros([BLOCK], dtype=tl.float32)
    if HAS_ADDEND:
        total += tl.load(addend_ptr + token * addend_row + columns * addend_col, mask=inside, other=0.0).to(tl.float32)
    for slot in range(top_k):
        row = tl.load(row_of_pair_ptr + token * pairs_row + slot * pairs_col).to(tl.int64) - first
        weight = tl.load(weights_ptr + token * weights_row + slot * weights_col)
        named = (row >= 0) & (row < num_rows)
        if BY_PAIR:
            row = token * top_k + slot
        # A dropped pair's weight may be anything; a row that no pair names is not read.
        weight = tl.where(named, weight, 0.0)
        read = columns < tl.where(named, hidden, 0)
        values = tl.load(rows_ptr + row * rows_row + columns * rows_col, mask=read, other=0.0).to(tl.float32)
        total += weight * values
    tl.store(out_ptr + token * out_row + columns * out_col, total.to(out_ptr.dtype.element_ty), mask=inside)


def permute(
    x: torch.Tensor, topk_ids: torch.Tensor, *, num_experts: int, first_expert: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `tokenspeed_kernel.ops.moe.permute`."""
    num_pairs, hidden = topk_ids.numel(), x.shape[1]
    order = sort_pairs(topk_ids, num_experts, first_expert)
    rows = torch.empty((num_pairs, hidden), dtype=x.dtype, device=x.device)
    if rows.numel():
        block = min(triton.next_power_of_2(hidden), _MAX_BLOCK)
        _gather_kernel[(num_pairs, triton.cdiv(hidden, block))](
            x, rows, order.pair_of_row, topk_ids.shape[1], hidden, *x.stride(), BLOCK=block, num_warps=4
        )
    return rows, order.offsets, order.row_of_pair


def unpermute(
    rows: torch.Tensor,
    row_of_pair: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    addend: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `tokenspeed_kernel.ops.moe.unpermute`."""
    if out is None:
        out = torch.empty((row_of_pair.shape[0], rows.shape[1]), dtype=rows.dtype, device=rows.device)
    return weighted_sum(rows, row_of_pair, topk_weights, addend, out)


def weighted_sum(
    rows: torch.Tensor, row_of_pair: torch.Tensor, topk_weights: torch.Tensor, addend: torch.Tensor | None, out: torch.Tensor
) -> torch.Tensor:
    """Write each token's weighted sum of rows into `out`, and return it."""
    return _launch(rows, row_of_pair, topk_weights, addend, out, 0, rows.shape[0], by_pair=False)


def sum_pairs(
    rows: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    addend: torch.Tensor | None,
    out: torch.Tensor,
    num_experts: int,
    first_expert: int,
) -> torch.Tensor:
    """As `weighted_sum`, of rows in the order of pairs; those of experts that lie elsewhere are not read."""
    return _launch(rows, topk_ids, topk_weights, addend, out, first_expert, num_experts, by_pair=True)


def _launch(
    rows: torch.Tensor,
    pairs: torch.Tensor,
    topk_weights: torch.Tensor,
    addend: torch.Tensor | None,
    out: torch.Tensor,
    first: int,
    number: int,
    *,
    by_pair: bool,
) -> torch.Tensor:
    num_tokens, hidden = out.shape
    if out.numel() == 0:
        return out
    # Few tokens: short blocks, so that the row's elements are spread over many processors.
    block = min(triton.next_power_of_2(hidden), 256 if num_tokens <= 64 else _MAX_BLOCK)
    stand_in = rows if addend is None else addend
    _weighted_sum_kernel[(num_tokens, triton.cdiv(hidden, block))](
        rows, pairs, topk_weights, stand_in, out, first, number, pairs.shape[1], hidden,
        *rows.stride(), *pairs.stride(), *topk_weights.stride(), *stand_in.stride(), *out.stride(),
        HAS_ADDEND=addend is not None, BY_PAIR=by_pair, BLOCK=block, num_warps=min(max(block // 128, 1), 4),
    )  # fmt: skip
    return out
