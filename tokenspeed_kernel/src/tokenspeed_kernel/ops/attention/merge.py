"""Public op that merges partial attention states: outputs over parts of the keys, weighted by their LSEs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NoReturn

import torch
from torch.compiler import is_compiling

from tokenspeed_kernel.dispatch import NEW_CALL, BoundOp, register_library_op
from tokenspeed_kernel.errors import ShapeError
from tokenspeed_kernel.ops.attention.contract import MERGE_STATES
from tokenspeed_kernel.ops.operands import OPERAND_ERRORS, refuse_kinds

__all__ = ["merge_states"]

_MERGE: Final = BoundOp(MERGE_STATES)
_FLOAT32: Final = torch.float32


def merge_states(
    outs: Sequence[torch.Tensor],
    lses: Sequence[torch.Tensor],
    *,
    out: torch.Tensor | None = None,
    lse_out: torch.Tensor | None = None,
    solution: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention states of the same queries over disjoint parts of their keys into the state over all of them.

    State i weighs exp(lses[i]) / sum of exp(lses). A state with LSE -inf (it saw no key) weighs nothing, and what its output holds
    is not used, not even if it is NaN. If only one state has weight, the result is that state, bit for bit. If none has, the result
    is output 0 and LSE -inf.

    Args:
        outs: one tensor for each state, [num_tokens, num_heads, head_dim] fp32, fp16, bf16 (fp64 on the CPU), all of one dtype,
            last dimension contiguous. Split a stacked tensor with ``unbind(0)``: that copies nothing.
        lses: as many, [num_tokens, num_heads] float32, base e, finite or -inf, any strides.
        out: optional, like outs[0], last dimension contiguous, written in place; it may be one of outs.
        lse_out: optional, like lses[0], written in place; it may be one of lses.
        solution: solution or kernel to use instead of the best that qualifies.
    Returns:
        (out, lse_out), or new tensors: [num_tokens, num_heads, head_dim] of the states' dtype, [num_tokens, num_heads] float32.
    Raises:
        ShapeError: there is no state, or shapes, dtypes or strides disagree.  NoKernelError: nothing qualifies.
    Source: arXiv:2501.01005, section 2.2 (attention states and their composition).
    """
    if is_compiling():
        result, lse = _LIBRARY_OP(list(outs), list(lses), solution)
        return (result if out is None else out.copy_(result)), (lse if lse_out is None else lse_out.copy_(lse))
    try:
        operands: tuple[torch.Tensor, ...] = (*outs, *lses)
        if out is not None:
            operands += (out,)
        if lse_out is not None:
            operands += (lse_out,)
        key = (len(outs), len(lses), out is None, lse_out is None, solution)
        looks_same, kernel = _MERGE.seen.get(key, NEW_CALL)
        if not looks_same(*operands):
            num_states = len(outs)
            if num_states == 0 or len(lses) != num_states:
                expected, got = "at least one state, and one LSE for each output", f"{num_states} outputs and {len(lses)} LSEs"
                raise ShapeError(MERGE_STATES.name, expected=expected, got=got)
            first = outs[0]
            shape, dtype, device = first.shape, first.dtype, first.device
            if len(shape) != 3:
                _refuse("outs[0] [num_tokens, num_heads, head_dim]", first)
            rows = shape[:2]
            for one in outs if out is None else (*outs, out):
                if one.shape != shape or one.dtype is not dtype or one.device != device or one.stride(2) != 1:
                    _refuse(f"every output {list(shape)} {_name(dtype)} on {device}, last dimension contiguous", one)
            for one in lses if lse_out is None else (*lses, lse_out):
                if one.shape != rows or one.dtype is not _FLOAT32 or one.device != device:
                    _refuse(f"every LSE {list(rows)} float32 on {device}", one)
            kernel = _MERGE.kernel(device, (dtype,), (num_states, shape[2]), solution)
            _MERGE.remember(key, kernel, *operands)
        merged: tuple[torch.Tensor, torch.Tensor] = kernel(outs, lses, out, lse_out)
        return merged
    except OPERAND_ERRORS as error:
        refuse_kinds(merge_states, locals(), error)
        raise


def _refuse(expected: str, got: torch.Tensor) -> NoReturn:
    shown = f"{list(got.shape)} {_name(got.dtype)} on {got.device}, strides {got.stride()}"
    raise ShapeError(MERGE_STATES.name, expected=expected, got=shown)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _eager(outs: list[torch.Tensor], lses: list[torch.Tensor], solution: str | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    return merge_states(outs, lses, solution=solution)


def _fake(outs: list[torch.Tensor], lses: list[torch.Tensor], solution: str | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    return outs[0].new_empty(outs[0].shape), lses[0].new_empty(lses[0].shape)


_LIBRARY_OP: Final = register_library_op(
    "merge_states(Tensor[] outs, Tensor[] lses, str? solution=None) -> (Tensor, Tensor)", _eager, _fake
)
