"""Public products of stacks of matrices: `bmm`, and the two forms that a mixture of experts needs."""

from __future__ import annotations

from typing import Any

import torch
from torch import is_grad_enabled
from torch.compiler import is_compiling

from tokenspeed_kernel.dispatch import NEW_CALL, BoundOp, check_devices, register_library_op
from tokenspeed_kernel.errors import ShapeError
from tokenspeed_kernel.ops.gemm.contract import BMM, GROUPED_MM_CONTIGUOUS, GROUPED_MM_MASKED
from tokenspeed_kernel.ops.gemm.parts import data_of, kind_of, put_together, schema, taken_apart, wants_gradient
from tokenspeed_kernel.ops.operands import OPERAND_ERRORS, check_operands, refuse_kinds, tensor_error
from tokenspeed_kernel.quantized import QuantizedTensor
from tokenspeed_kernel.signature import Format

__all__ = ["bmm", "grouped_mm_contiguous", "grouped_mm_masked"]

_Operand = torch.Tensor | QuantizedTensor
_bmm, _contiguous, _masked = BoundOp(BMM), BoundOp(GROUPED_MM_CONTIGUOUS), BoundOp(GROUPED_MM_MASKED)
_bmm_table, _contiguous_table, _masked_table = _bmm.table, _contiguous.table, _masked.table


def bmm(
    x: torch.Tensor | QuantizedTensor,
    weight: torch.Tensor | QuantizedTensor,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    solution: str | None = None,
) -> torch.Tensor:
    """Multiply matrix by matrix: `out[b] = x[b] @ weight[b].T`. For inference only: no gradient flows.

    Args:
        x: [batch, rows, in_features] fp32, bf16 or fp16, any strides; or a `QuantizedTensor` of fp8, mxfp8, mxfp4 or nvfp4.
        weight: [batch, out_features, in_features], dtype of x, any strides (so [batch, in, out] is given with .mT); or a
            `QuantizedTensor` in any format, with any x.
        out: optional [batch, rows, out_features], any strides, written in place; it must not overlap an input.
        out_dtype: dtype of the result: x's, or fp32; that of out, else of x (bf16 for a quantized x), where left out.
        solution: solution or kernel to insist on; chosen by the registry where left out.
    Returns:
        out, or a new contiguous [batch, rows, out_features].
    Raises:
        ShapeError: shapes or dtypes disagree.  NoKernelError: nothing qualifies.
    Source: Dongarra et al., A Set of Level 3 Basic Linear Algebra Subprograms, ACM TOMS 16 (1990) (GEMM).
    """
    if is_compiling():
        dtype = out_dtype if out_dtype is not None or out is None else out.dtype
        result: torch.Tensor = _library_bmm(*taken_apart(x), *taken_apart(weight), dtype, solution)
        return result if out is None else out.copy_(result)
    try:
        return _run_bmm(x, weight, out, out_dtype, solution)
    except OPERAND_ERRORS as error:
        refuse_kinds(bmm, locals(), error)
        raise


def _run_bmm(
    x: _Operand, weight: _Operand, out: torch.Tensor | None, out_dtype: torch.dtype | None, solution: str | None
) -> torch.Tensor:
    plain = type(x) is not QuantizedTensor and type(weight) is not QuantizedTensor
    if plain:
        operands: tuple[Any, ...] = (x, weight)
        if out is not None:
            operands += (out,)
        seen_key = (x.shape, weight.shape, out is None, out_dtype, solution)
        looks_same, seen = _bmm.seen.get(seen_key, NEW_CALL)
        if looks_same(*operands):
            if out_dtype is None:
                out_dtype = x.dtype if out is None else out.dtype  # type: ignore[union-attr]  # x is plain
            computed: torch.Tensor = seen(x, weight, out, out_dtype)
            return computed
    shape, weight_shape, device = _shapes(BMM.name, x, weight)
    if len(shape) != 3 or len(weight_shape) != 3 or shape[0] != weight_shape[0] or shape[2] != weight_shape[2]:
        expected = "x [batch, rows, in_features] and weight [batch, out_features, in_features]"
        raise _shape_error(BMM.name, expected, x, weight, "transpose a weight [batch, in, out] with .mT")
    out_dtype = _out_dtype(BMM.name, x, out, out_dtype, (shape[0], shape[1], weight_shape[1]))
    kinds = kind_of(x), kind_of(weight)
    key = (device, weight.device, *kinds, out_dtype, None if out is None else out.device, solution)
    kernel = _bmm_table.get(key)
    if kernel is None:
        check_operands(BMM.name, x=x, weight=weight, out=out)
        check_devices(BMM.name, device, x=data_of(x), weight=data_of(weight), out=out)
        kernel = _bmm.bind(key, device, (*kinds, out_dtype), (), solution)
    if is_grad_enabled() and wants_gradient(x, weight):
        with torch.no_grad():
            result: torch.Tensor = kernel(x, weight, out, out_dtype)
        return result
    if plain:
        _bmm.remember(seen_key, kernel, *operands)
    result = kernel(x, weight, out, out_dtype)
    return result


def grouped_mm_contiguous(
    x: torch.Tensor | QuantizedTensor,
    weight: torch.Tensor | QuantizedTensor,
    offsets: torch.Tensor | None = None,
    expert_ids: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    solution: str | None = None,
) -> torch.Tensor:
    """Multiply each row by the weight of its expert, the rows of an expert lying together: `out[i] = weight[expert(i)] @ x[i]`.

    Which expert a row belongs to is said by `offsets` or by `expert_ids`. A row of no expert gives zeros, and is not read. The
    values stay on the device: nothing waits for them. For inference only: no gradient flows.

    Args:
        x: [num_rows, in_features] fp32, bf16 or fp16, any strides; or a `QuantizedTensor` of fp8, mxfp8, mxfp4 or nvfp4.
        weight: [num_experts, out_features, in_features], dtype of x, any strides; or a `QuantizedTensor` in any format.
        offsets: [num_experts + 1] int32 or int64, from 0, not decreasing: expert e has rows offsets[e] to offsets[e + 1] - 1. An
            expert may have none. Rows from the last offset on belong to no one.
        expert_ids: [num_rows] int32 or int64, instead of offsets: the expert of each row; -1, and every other number outside of
            0..num_experts-1, is no expert (padding). Rows are sorted by expert apart from padding; other orders are right but slow.
        out: optional [num_rows, out_features], any strides, written in place; it must not overlap an input.
        out_dtype: dtype of the result: x's, or fp32; that of out, else of x (bf16 for a quantized x), where left out.
        solution: solution or kernel to insist on; chosen by the registry where left out.
    Returns:
        out, or a new contiguous [num_rows, out_features].
    Raises:
        ShapeError: shapes or dtypes disagree.  NoKernelError: nothing qualifies.
    Source: Gale et al., MegaBlocks, arXiv:2211.15841, section 4; DeepGEMM's m-grouped contiguous layout.
    """
    if is_compiling():
        dtype = out_dtype if out_dtype is not None or out is None else out.dtype
        result: torch.Tensor = _library_contiguous(*taken_apart(x), *taken_apart(weight), offsets, expert_ids, dtype, solution)
        return result if out is None else out.copy_(result)
    try:
        return _run_contiguous(x, weight, offsets, expert_ids, out, out_dtype, solution)
    except OPERAND_ERRORS as error:
        refuse_kinds(grouped_mm_contiguous, locals(), error)
        raise


def _run_contiguous(
    x: _Operand,
    weight: _Operand,
    offsets: torch.Tensor | None,
    expert_ids: torch.Tensor | None,
    out: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    solution: str | None,
) -> torch.Tensor:
    plain = type(x) is not QuantizedTensor and type(weight) is not QuantizedTensor
    if plain:
        operands: tuple[Any, ...] = (x, weight)
        if offsets is not None:
            operands += (offsets,)
        if expert_ids is not None:
            operands += (expert_ids,)
        if out is not None:
            operands += (out,)
        seen_key = (x.shape, weight.shape, offsets is None, expert_ids is None, out is None, out_dtype, solution)
        looks_same, seen = _contiguous.seen.get(seen_key, NEW_CALL)
        if looks_same(*operands):
            if out_dtype is None:
                out_dtype = x.dtype if out is None else out.dtype  # type: ignore[union-attr]  # x is plain
            computed: torch.Tensor = seen(x, weight, offsets, expert_ids, out, out_dtype)
            return computed
    name = GROUPED_MM_CONTIGUOUS.name
    shape, weight_shape, device = _shapes(name, x, weight)
    if len(shape) != 2 or len(weight_shape) != 3 or shape[1] != weight_shape[2]:
        expected = "x [num_rows, in_features] and weight [num_experts, out_features, in_features]"
        raise _shape_error(name, expected, x, weight, "transpose a weight [num_experts, in, out] with .mT")
    owner = offsets if expert_ids is None else expert_ids
    wanted = (weight_shape[0] + 1,) if expert_ids is None else (shape[0],)
    if owner is None or (offsets is not None and expert_ids is not None):
        expected, got = "one of offsets and expert_ids", "none" if owner is None else "both"
        raise ShapeError(name, expected=expected, got=got, fix="say by one of them which expert a row belongs to")
    if owner.shape != wanted:
        which = "offsets" if expert_ids is None else "expert_ids"
        raise ShapeError(name, expected=f"{which} {list(wanted)} int32 or int64", got=f"{list(owner.shape)} {owner.dtype}")
    out_dtype = _out_dtype(name, x, out, out_dtype, (shape[0], weight_shape[1]))
    kinds = kind_of(x), kind_of(weight)
    by_ids, out_device = expert_ids is not None, None if out is None else out.device
    key = (device, weight.device, *kinds, owner.dtype, owner.device, by_ids, out_dtype, out_device, solution)
    kernel = _contiguous_table.get(key)
    if kernel is None:
        check_operands(name, x=x, weight=weight, offsets=offsets, expert_ids=expert_ids, out=out)
        check_devices(name, device, x=data_of(x), weight=data_of(weight), offsets=offsets, expert_ids=expert_ids, out=out)
        owners = (None, owner.dtype) if by_ids else (owner.dtype, None)
        kernel = _contiguous.bind(key, device, (*kinds, *owners, out_dtype), (), solution)
    if is_grad_enabled() and wants_gradient(x, weight):
        with torch.no_grad():
            result: torch.Tensor = kernel(x, weight, offsets, expert_ids, out, out_dtype)
        return result
    if plain:
        _contiguous.remember(seen_key, kernel, *operands)
    result = kernel(x, weight, offsets, expert_ids, out, out_dtype)
    return result


def grouped_mm_masked(
    x: torch.Tensor | QuantizedTensor,
    weight: torch.Tensor | QuantizedTensor,
    masked_m: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    solution: str | None = None,
) -> torch.Tensor:
    """Multiply the first `masked_m[e]` rows of each expert's slab by its weight; the others give zeros, and are not read.

    For graphs, where each expert has room for max_m rows, of which the device alone knows how many there are. For inference only:
    no gradient flows.

    Args:
        x: [num_experts, max_m, in_features] fp32, bf16 or fp16, any strides; or a `QuantizedTensor` of fp8, mxfp8, mxfp4 or nvfp4.
        weight: [num_experts, out_features, in_features], dtype of x, any strides; or a `QuantizedTensor` in any format.
        masked_m: [num_experts] int32 or int64, rows of each expert; below 0 counts as 0, above max_m as max_m.
        out: optional [num_experts, max_m, out_features], any strides, written in place; it must not overlap an input.
        out_dtype: dtype of the result: x's, or fp32; that of out, else of x (bf16 for a quantized x), where left out.
        solution: solution or kernel to insist on; chosen by the registry where left out.
    Returns:
        out, or a new contiguous [num_experts, max_m, out_features].
    Raises:
        ShapeError: shapes or dtypes disagree.  NoKernelError: nothing qualifies.
    Source: DeepGEMM's m-grouped masked layout.
    """
    if is_compiling():
        dtype = out_dtype if out_dtype is not None or out is None else out.dtype
        result: torch.Tensor = _library_masked(*taken_apart(x), *taken_apart(weight), masked_m, dtype, solution)
        return result if out is None else out.copy_(result)
    try:
        return _run_masked(x, weight, masked_m, out, out_dtype, solution)
    except OPERAND_ERRORS as error:
        refuse_kinds(grouped_mm_masked, locals(), error)
        raise


def _run_masked(
    x: _Operand,
    weight: _Operand,
    masked_m: torch.Tensor,
    out: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    solution: str | None,
) -> torch.Tensor:
    plain = type(x) is not QuantizedTensor and type(weight) is not QuantizedTensor
    if plain:
        operands: tuple[Any, ...] = (x, weight, masked_m)
        if out is not None:
            operands += (out,)
        seen_key = (x.shape, weight.shape, out is None, out_dtype, solution)
        looks_same, seen = _masked.seen.get(seen_key, NEW_CALL)
        if looks_same(*operands):
            if out_dtype is None:
                out_dtype = x.dtype if out is None else out.dtype  # type: ignore[union-attr]  # x is plain
            computed: torch.Tensor = seen(x, weight, masked_m, out, out_dtype)
            return computed
    name = GROUPED_MM_MASKED.name
    shape, weight_shape, device = _shapes(name, x, weight)
    if len(shape) != 3 or len(weight_shape) != 3 or shape[0] != weight_shape[0] or shape[2] != weight_shape[2]:
        expected = "x [num_experts, max_m, in_features] and weight [num_experts, out_features, in_features]"
        raise _shape_error(name, expected, x, weight, "transpose a weight [num_experts, in, out] with .mT")
    if masked_m.shape != (shape[0],):
        expected, got = f"masked_m [{shape[0]}] int32 or int64", f"{list(masked_m.shape)} {masked_m.dtype}"
        raise ShapeError(name, expected=expected, got=got)
    out_dtype = _out_dtype(name, x, out, out_dtype, (shape[0], shape[1], weight_shape[1]))
    kinds = kind_of(x), kind_of(weight)
    out_device = None if out is None else out.device
    key = (device, weight.device, *kinds, masked_m.dtype, masked_m.device, out_dtype, out_device, solution)
    kernel = _masked_table.get(key)
    if kernel is None:
        check_operands(name, x=x, weight=weight, masked_m=masked_m, out=out)
        check_devices(name, device, x=data_of(x), weight=data_of(weight), masked_m=masked_m, out=out)
        kernel = _masked.bind(key, device, (*kinds, masked_m.dtype, out_dtype), (), solution)
    if is_grad_enabled() and wants_gradient(x, weight):
        with torch.no_grad():
            result: torch.Tensor = kernel(x, weight, masked_m, out, out_dtype)
        return result
    if plain:
        _masked.remember(seen_key, kernel, *operands)
    result = kernel(x, weight, masked_m, out, out_dtype)
    return result


def _shapes(op: str, x: _Operand, weight: _Operand) -> tuple[tuple[int, ...], tuple[int, ...], torch.device]:
    try:
        return x.shape, weight.shape, x.device
    except AttributeError:
        raise tensor_error(op, x=x, weight=weight) from None


def _shape_error(op: str, expected: str, x: _Operand, weight: _Operand, fix: str) -> ShapeError:
    return ShapeError(op, expected=expected, got=f"x {list(x.shape)} and weight {list(weight.shape)}", fix=fix)


def _out_dtype(
    op: str, x: _Operand, out: torch.Tensor | None, out_dtype: torch.dtype | None, shape: tuple[int, ...]
) -> torch.dtype:
    """The result's dtype, once out is known to fit."""
    if out is not None:
        out_dtype = out_dtype or out.dtype
        if out.shape != shape or out.dtype is not out_dtype:
            expected, got = f"out {list(shape)} {out_dtype}", f"{list(out.shape)} {out.dtype}"
            fix = "give out the shape of the product and the dtype that out_dtype asks for"
            raise ShapeError(op, expected=expected, got=got, fix=fix)
        return out_dtype
    if out_dtype is not None:
        return out_dtype
    kind = kind_of(x)
    return torch.bfloat16 if isinstance(kind, Format) else kind


def _fake_dtype(x: torch.Tensor, x_format: str, out_dtype: torch.dtype | None) -> torch.dtype:
    return out_dtype or (torch.bfloat16 if x_format else x.dtype)


_PARTS = 6
"""Arguments of one operand of a library op."""


def _library_run_bmm(*arguments: object) -> torch.Tensor:
    x, weight, rest = _operands(arguments)
    out_dtype, solution = _padded(rest, 2)
    return _run_bmm(x, weight, None, out_dtype, solution)


def _library_run_contiguous(*arguments: object) -> torch.Tensor:
    x, weight, rest = _operands(arguments)
    offsets, expert_ids, out_dtype, solution = _padded(rest, 4)
    return _run_contiguous(x, weight, offsets, expert_ids, None, out_dtype, solution)


def _library_run_masked(*arguments: object) -> torch.Tensor:
    x, weight, rest = _operands(arguments)
    masked_m, out_dtype, solution = _padded(rest, 3)
    return _run_masked(x, weight, masked_m, None, out_dtype, solution)


def _operands(arguments: tuple[object, ...]) -> tuple[_Operand, _Operand, tuple[object, ...]]:
    first, second = arguments[:_PARTS], arguments[_PARTS : 2 * _PARTS]
    return put_together(*first), put_together(*second), arguments[2 * _PARTS :]  # type: ignore[arg-type]


def _padded(rest: tuple[object, ...], count: int) -> tuple:  # type: ignore[type-arg]  # of what the schema says
    return *rest, *(None,) * (count - len(rest))


def _fake(place_of_dtype: int) -> object:
    """A fake implementation: x's leading dimensions, then the weight's rows."""

    def fake(*arguments: object) -> torch.Tensor:
        x, x_format, x_shape = arguments[0], arguments[4], arguments[5]
        weight, fmt, shape = arguments[_PARTS], arguments[_PARTS + 4], arguments[_PARTS + 5]
        assert isinstance(x, torch.Tensor) and isinstance(weight, torch.Tensor)
        leading = x_shape[:-1] if x_format else x.shape[:-1]  # type: ignore[index]
        features = shape[-2] if fmt else weight.shape[-2]  # type: ignore[index]
        rest = arguments[2 * _PARTS :]
        out_dtype = rest[place_of_dtype] if len(rest) > place_of_dtype else None
        return x.new_empty((*leading, features), dtype=_fake_dtype(x, x_format, out_dtype))  # type: ignore[arg-type]

    return fake


_BOTH = f"{schema('x', 'x_')}, {schema('weight')}"
_TAIL = "ScalarType? out_dtype=None, str? solution=None) -> Tensor"
_library_bmm = register_library_op(f"bmm({_BOTH}, {_TAIL}", _library_run_bmm, _fake(0))  # type: ignore[arg-type]
_library_contiguous = register_library_op(
    f"grouped_mm_contiguous({_BOTH}, Tensor? offsets=None, Tensor? expert_ids=None, {_TAIL}",
    _library_run_contiguous,
    _fake(2),  # type: ignore[arg-type]
)
_library_masked = register_library_op(
    f"grouped_mm_masked({_BOTH}, Tensor masked_m, {_TAIL}",
    _library_run_masked,
    _fake(1),  # type: ignore[arg-type]
)
