"""Public op: slots of the k best scores of each row."""

from __future__ import annotations

from typing import Final

import torch
from torch.compiler import is_compiling

from tokenspeed_kernel.dispatch import BoundOp, check_devices, register_library_op
from tokenspeed_kernel.errors import ShapeError
from tokenspeed_kernel.ops.dsa.contract import TOPK_SLOTS
from tokenspeed_kernel.ops.mla.check import refuse
from tokenspeed_kernel.ops.operands import OPERAND_ERRORS, refuse_kinds

__all__ = ["topk_slots"]

_TOPK: Final = BoundOp(TOPK_SLOTS)


def topk_slots(
    scores: torch.Tensor,
    k: int,
    *,
    page_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    page_size: int = 1,
    out: torch.Tensor | None = None,
    solution: str | None = None,
) -> torch.Tensor:
    """Choose the k best scores of each row, and give their slots in the cache.

    Of equal scores the one at the lower position is chosen. Scores of -inf and NaN are never chosen. A row is in the order of the
    positions, not of the scores, so that it does not depend on the kernel; a row with fewer than k scores is filled with -1.

    Args:
        scores: [num_tokens, num_keys] float32, last dimension contiguous; -inf where a key is not to be chosen.
        k: entries to choose, at least 1; it may exceed num_keys.
        page_table: optional [num_reqs, max_pages] int32: position p of request r lies in slot
            page_table[r, p // page_size] * page_size + p % page_size, which is given; it is -1 where the page is negative or the
            slot does not fit in int32. Without it the positions themselves are given.
        cu_seqlens_q: [num_reqs + 1] int32, request r's rows are [cu[r], cu[r + 1]); needed with page_table.
        page_size: tokens in a page; for page_table.
        out: optional [num_tokens, k] int32, last dimension contiguous, written in place.
        solution: solution or kernel to use instead of the best that qualifies.
    Returns:
        out, or a new tensor of that shape.
    Raises:
        ShapeError: shapes, dtypes or strides disagree, or k or page_size is less than 1.  NoKernelError: nothing qualifies.
    Source: DeepSeek-V3.2-Exp technical report, section 1, equation 2.
    """
    if is_compiling():
        result = _LIBRARY_OP(scores, k, page_table, cu_seqlens_q, page_size, solution)
        return result if out is None else out.copy_(result)
    try:
        op = TOPK_SLOTS.name
        if scores.dim() != 2 or scores.dtype != torch.float32 or scores.stride(1) != 1:
            refuse(op, "scores [num_tokens, num_keys] float32, last dimension contiguous", scores, strides=True)
        num_tokens, num_keys = scores.shape
        if k < 1 or page_size < 1:
            raise ShapeError(op, expected="k >= 1 and page_size >= 1", got=f"k={k}, page_size={page_size}")
        if (page_table is None) != (cu_seqlens_q is None):
            got = f"page_table {'left out' if page_table is None else 'given'}, cu_seqlens_q not so"
            raise ShapeError(op, expected="page_table and cu_seqlens_q together, or neither", got=got)
        if page_table is not None and cu_seqlens_q is not None:
            if page_table.dim() != 2 or page_table.dtype != torch.int32 or page_table.shape[1] * page_size < num_keys:
                needed = -(-num_keys // page_size)
                refuse(op, f"page_table [num_reqs, at least {needed}] int32, for {num_keys} keys by {page_size}", page_table)
            if cu_seqlens_q.shape != (page_table.shape[0] + 1,) or cu_seqlens_q.dtype != torch.int32:
                refuse(op, f"cu_seqlens_q [{page_table.shape[0] + 1}] int32", cu_seqlens_q)
        if out is not None and (out.shape != (num_tokens, k) or out.dtype != torch.int32 or out.stride(1) != 1):
            refuse(op, f"out [{num_tokens}, {k}] int32, last dimension contiguous", out, strides=True)
        device = scores.device
        table_device = None if page_table is None else page_table.device
        offsets_device = None if cu_seqlens_q is None else cu_seqlens_q.device
        out_device = device if out is None else out.device
        key = (device, table_device, offsets_device, out_device, k, solution)
        kernel = _TOPK.table.get(key)
        if kernel is None:
            check_devices(op, device, page_table=page_table, cu_seqlens_q=cu_seqlens_q, out=out)
            kernel = _TOPK.bind(key, device, (scores.dtype,), (k,), solution)
        slots: torch.Tensor = kernel(scores, k, page_table, cu_seqlens_q, page_size, out)
        return slots
    except OPERAND_ERRORS as error:
        refuse_kinds(topk_slots, locals(), error)
        raise


def _eager(
    scores: torch.Tensor,
    k: int,
    page_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    page_size: int = 1,
    solution: str | None = None,
) -> torch.Tensor:
    paging = {"page_table": page_table, "cu_seqlens_q": cu_seqlens_q}
    return topk_slots(scores, k, **paging, page_size=page_size, solution=solution)


def _fake(
    scores: torch.Tensor,
    k: int,
    page_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    page_size: int = 1,
    solution: str | None = None,
) -> torch.Tensor:
    return scores.new_empty((scores.shape[0], k), dtype=torch.int32)


_LIBRARY_OP: Final = register_library_op(
    "topk_slots(Tensor scores, int k, Tensor? page_table=None, Tensor? cu_seqlens_q=None, int page_size=1, "
    "str? solution=None) -> Tensor",
    _eager,
    _fake,
)
