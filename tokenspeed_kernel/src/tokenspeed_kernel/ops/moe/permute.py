"""`permute` and `unpermute`: tokens sorted by expert, and back."""

from __future__ import annotations

import torch
from torch.compiler import is_compiling

from tokenspeed_kernel.dispatch import BoundOp, check_devices, register_library_op
from tokenspeed_kernel.errors import ShapeError
from tokenspeed_kernel.ops.moe.contract import PERMUTE, UNPERMUTE
from tokenspeed_kernel.ops.operands import OPERAND_ERRORS, check_operands, refuse_kinds, tensor_error

__all__ = ["permute", "unpermute"]

_permute = BoundOp(PERMUTE)
_permute_table = _permute.table
_unpermute = BoundOp(UNPERMUTE)
_unpermute_table = _unpermute.table
_Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def permute(
    x: torch.Tensor, topk_ids: torch.Tensor, *, num_experts: int, first_expert: int = 0, solution: str | None = None
) -> _Three:
    """Copy each token once for each of its experts that lies here, sorted by expert.

    The rows of one expert keep the order of (token, slot). Pairs with an id outside [first_expert, first_expert + num_experts),
    such as -1 or an expert of another rank, are dropped. Nothing is read back from the device: there are always num_tokens * top_k
    rows, and those that no pair fills, at the end, are 0.

    Args:
        x: [num_tokens, hidden_size] fp32, bf16 or fp16, any strides.
        topk_ids: [num_tokens, top_k] int32.
        num_experts: experts that lie here.
        first_expert: id of the first of them.
        solution: solution or kernel to insist on; chosen by the registry where left out.
    Returns:
        rows: [num_tokens * top_k, hidden_size], dtype of x, contiguous.
        expert_offsets: [num_experts + 1] int32; expert e has the rows expert_offsets[e] to expert_offsets[e + 1] - 1.
        row_of_pair: [num_tokens, top_k] int32, the row of each pair; -1 for a dropped one.
    Raises:
        ShapeError: shapes or dtypes disagree.  NoKernelError: nothing qualifies.
    Source: Gale et al., MegaBlocks, arXiv:2211.15841, section 5.2 (grouping tokens by expert without a capacity).
    """
    if is_compiling():
        result: _Three = _library_permute(x, topk_ids, num_experts, first_expert, solution)
        return result
    try:
        return _run_permute(x, topk_ids, num_experts, first_expert, solution)
    except OPERAND_ERRORS as error:
        refuse_kinds(permute, locals(), error)
        raise


def unpermute(
    rows: torch.Tensor,
    row_of_pair: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    addend: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    solution: str | None = None,
) -> torch.Tensor:
    """Sum each token's rows with its weights: `out[t] = addend[t] + sum over s of topk_weights[t, s] * rows[row_of_pair[t, s]]`.

    The sum is float32, slot after slot, and is rounded once. A token without any row gets 0, or its addend. Rows that no pair names
    are not read: what lies there may be NaN.

    Args:
        rows: [num_rows, hidden_size] fp32, bf16 or fp16, any strides.
        row_of_pair: [num_tokens, top_k] int32; entries outside the rows, such as -1, add nothing.
        topk_weights: [num_tokens, top_k] fp32.
        addend: optional [num_tokens, hidden_size], dtype of rows: the output of a shared expert.
        out: optional [num_tokens, hidden_size], dtype of rows, written in place; it may be addend.
        solution: solution or kernel to insist on; chosen by the registry where left out.
    Returns:
        out, or a new contiguous [num_tokens, hidden_size], dtype of rows.
    Raises:
        ShapeError: shapes or dtypes disagree.  NoKernelError: nothing qualifies.
    Source: Gale et al., MegaBlocks, arXiv:2211.15841, section 5.2.
    """
    if is_compiling():
        result: torch.Tensor = _library_unpermute(rows, row_of_pair, topk_weights, addend, solution)
        return result if out is None else out.copy_(result)
    try:
        return _run_unpermute(rows, row_of_pair, topk_weights, addend, solution, out)
    except OPERAND_ERRORS as error:
        refuse_kinds(unpermute, locals(), error)
        raise


# The library ops' implementations: a compiled graph calls them at run time, when nothing is being compiled any more.
def _run_permute(
    x: torch.Tensor, topk_ids: torch.Tensor, num_experts: int, first_expert: int = 0, solution: str | None = None
) -> _Three:
    try:
        shape, ids_shape, device = x.shape, topk_ids.shape, x.device
    except AttributeError:
        raise tensor_error(PERMUTE.name, x=x, topk_ids=topk_ids) from None
    if len(shape) != 2 or len(ids_shape) != 2 or ids_shape[0] != shape[0]:
        raise ShapeError(
            PERMUTE.name,
            expected="x [num_tokens, hidden_size] and topk_ids [num_tokens, top_k]",
            got=f"x {list(shape)} and topk_ids {list(ids_shape)}",
        )
    if num_experts < 1:
        raise ShapeError(PERMUTE.name, expected="num_experts >= 1", got=f"{num_experts}")
    key = (device, topk_ids.device, x.dtype, topk_ids.dtype, solution)
    kernel = _permute_table.get(key)
    if kernel is None:
        check_operands(PERMUTE.name, x=x, topk_ids=topk_ids)
        if topk_ids.dtype is not torch.int32:
            raise ShapeError(PERMUTE.name, expected="topk_ids int32", got=f"{topk_ids.dtype}", fix="pass topk_ids.int()")
        check_devices(PERMUTE.name, device, topk_ids=topk_ids)
        kernel = _permute.bind(key, device, (x.dtype,), (), solution)
    result: _Three = kernel(x, topk_ids, num_experts=num_experts, first_expert=first_expert)
    return result


def _fake_permute(
    x: torch.Tensor, topk_ids: torch.Tensor, num_experts: int, first_expert: int = 0, solution: str | None = None
) -> _Three:
    num_rows = topk_ids.shape[0] * topk_ids.shape[1]
    return (
        x.new_empty((num_rows, x.shape[1])),
        topk_ids.new_empty((num_experts + 1,)),
        topk_ids.new_empty((topk_ids.shape[0], topk_ids.shape[1])),
    )


def _run_unpermute(
    rows: torch.Tensor,
    row_of_pair: torch.Tensor,
    topk_weights: torch.Tensor,
    addend: torch.Tensor | None = None,
    solution: str | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    op = UNPERMUTE.name
    try:
        shape, pairs, shares, device = rows.shape, row_of_pair.shape, topk_weights.shape, rows.device
    except AttributeError:
        raise tensor_error(op, rows=rows, row_of_pair=row_of_pair, topk_weights=topk_weights) from None
    if len(shape) != 2 or len(pairs) != 2 or shares != pairs:
        raise ShapeError(
            op,
            expected="rows [num_rows, hidden_size], row_of_pair and topk_weights [num_tokens, top_k]",
            got=f"rows {list(shape)}, row_of_pair {list(pairs)} and topk_weights {list(topk_weights.shape)}",
        )
    wanted = (pairs[0], shape[1])
    if addend is not None and addend.shape != wanted:
        raise ShapeError(op, expected=f"addend {list(wanted)}", got=f"{list(addend.shape)}")
    if out is not None and out.shape != wanted:
        raise ShapeError(op, expected=f"out {list(wanted)}", got=f"{list(out.shape)}")
    key = (
        device,
        row_of_pair.device,
        topk_weights.device,
        rows.dtype,
        row_of_pair.dtype,
        topk_weights.dtype,
        None if addend is None else (addend.dtype, addend.device),
        None if out is None else (out.dtype, out.device),
        solution,
    )
    kernel = _unpermute_table.get(key)
    if kernel is None:
        check_operands(op, rows=rows, row_of_pair=row_of_pair, topk_weights=topk_weights, addend=addend, out=out)
        for name, operand, dtype in (
            ("row_of_pair", row_of_pair, torch.int32),
            ("topk_weights", topk_weights, torch.float32),
            ("addend", addend, rows.dtype),
            ("out", out, rows.dtype),
        ):
            if operand is not None and operand.dtype is not dtype:
                raise ShapeError(op, expected=f"{name} {dtype}", got=f"{operand.dtype}")
        check_devices(op, device, row_of_pair=row_of_pair, topk_weights=topk_weights, addend=addend, out=out)
        kernel = _unpermute.bind(key, device, (rows.dtype, None if addend is None else addend.dtype), (), solution)
    result: torch.Tensor = kernel(rows, row_of_pair, topk_weights, addend=addend, out=out)
    return result


def _fake_unpermute(
    rows: torch.Tensor,
    row_of_pair: torch.Tensor,
    topk_weights: torch.Tensor,
    addend: torch.Tensor | None = None,
    solution: str | None = None,
) -> torch.Tensor:
    return rows.new_empty((row_of_pair.shape[0], rows.shape[1]))


_library_permute = register_library_op(
    "permute(Tensor x, Tensor topk_ids, int num_experts, int first_expert=0, str? solution=None) -> (Tensor, Tensor, Tensor)",
    _run_permute,
    _fake_permute,
)
_library_unpermute = register_library_op(
    "unpermute(Tensor rows, Tensor row_of_pair, Tensor topk_weights, Tensor? addend=None, str? solution=None) -> Tensor",
    _run_unpermute,
    _fake_unpermute,
)
