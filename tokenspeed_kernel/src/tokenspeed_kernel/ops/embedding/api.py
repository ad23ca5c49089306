"""Public embedding ops: shapes are checked once, then the bound kernel is called."""

from __future__ import annotations

import torch
from torch import is_grad_enabled
from torch.compiler import is_compiling

from tokenspeed_kernel.dispatch import BoundOp, check_devices, register_library_op
from tokenspeed_kernel.errors import ShapeError
from tokenspeed_kernel.ops.embedding.contract import EMBEDDING
from tokenspeed_kernel.ops.operands import OPERAND_ERRORS, check_operands, refuse_kinds, tensor_error
from tokenspeed_kernel.quantized import QuantizedTensor
from tokenspeed_kernel.signature import Format

__all__ = ["embedding"]

_embedding = BoundOp(EMBEDDING)
_embedding_table = _embedding.table


def embedding(
    token_ids: torch.Tensor,
    weight: torch.Tensor | QuantizedTensor,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    solution: str | None = None,
) -> torch.Tensor:
    """Look up the row of each token.

    An id outside 0..vocab-1 gives a zero row: that is what a shard of a vocabulary needs, and what padding wants. For inference
    only: no gradient flows.

    Args:
        token_ids: [num_tokens] int32 or int64, any stride.
        weight: [vocab, hidden] fp32, bf16 or fp16, any strides; or a `QuantizedTensor` in any format.
        out: optional [num_tokens, hidden], written in place.
        out_dtype: dtype of the rows: weight's; of a quantized weight fp32, bf16 or fp16: that of out, else fp32, where left out.
        solution: solution or kernel to insist on; chosen by the registry where left out.
    Returns:
        out, or a new contiguous [num_tokens, hidden].
    Raises:
        ShapeError: shapes or dtypes disagree.  NoKernelError: nothing qualifies.
    Source: Bengio et al., A Neural Probabilistic Language Model, JMLR 3 (2003), section 2 (the matrix C).
    """
    if is_compiling():
        if isinstance(weight, QuantizedTensor):
            result: torch.Tensor = _library_embedding_scaled(
                token_ids, weight.data, weight.scale, weight.global_scale, weight.zero_point,
                str(weight.format), weight.shape, out_dtype or (torch.float32 if out is None else out.dtype), solution,
            )  # fmt: skip
        else:
            result = _library_embedding(token_ids, weight, solution)
        return result if out is None else out.copy_(result)
    try:
        return _run_embedding(token_ids, weight, solution, out, out_dtype)
    except OPERAND_ERRORS as error:
        refuse_kinds(embedding, locals(), error)
        raise


# The library op's implementation: a compiled graph calls it at run time, when nothing is being compiled any more.
def _run_embedding(
    token_ids: torch.Tensor,
    weight: torch.Tensor | QuantizedTensor,
    solution: str | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    try:
        ids_shape, weight_shape, ids_dtype, device = token_ids.shape, weight.shape, token_ids.dtype, weight.device
        dtype: torch.dtype | Format = weight.format if type(weight) is QuantizedTensor else weight.dtype  # type: ignore[union-attr]
    except AttributeError:
        raise tensor_error(EMBEDDING.name, token_ids=token_ids, weight=weight) from None
    if len(ids_shape) != 1 or len(weight_shape) != 2:
        raise ShapeError(
            EMBEDDING.name,
            expected="token_ids [num_tokens] and weight [vocab, hidden]",
            got=f"token_ids {list(ids_shape)} and weight {list(weight_shape)}",
            fix="flatten token_ids",
        )
    if out is not None:
        out_key = out.dtype, out.device
        out_dtype = out.dtype if out_dtype is None else out_dtype
        if out.shape != (ids_shape[0], weight_shape[1]) or out_key[0] is not out_dtype:
            raise _out_error(token_ids, weight, out)
    else:
        out_key = None
        if out_dtype is None:
            out_dtype = torch.float32 if type(weight) is QuantizedTensor else dtype  # type: ignore[assignment]
    key = (device, token_ids.device, ids_dtype, dtype, out_key, out_dtype, solution)
    kernel = _embedding_table.get(key)
    if kernel is None:
        check_operands(EMBEDDING.name, token_ids=token_ids, weight=weight, out=out)
        if isinstance(weight, torch.Tensor) and out_dtype is not weight.dtype:
            raise _out_error(token_ids, weight, out)
        check_devices(EMBEDDING.name, device, token_ids=token_ids, out=out)
        kernel = _embedding.bind(key, device, (ids_dtype, dtype, out_dtype), (), solution)
    if is_grad_enabled() and isinstance(weight, torch.Tensor) and weight.requires_grad:
        with torch.no_grad():
            result: torch.Tensor = kernel(token_ids, weight, out=out, out_dtype=out_dtype)
        return result
    result = kernel(token_ids, weight, out=out, out_dtype=out_dtype)
    return result


def _out_error(token_ids: torch.Tensor, weight: torch.Tensor | QuantizedTensor, out: torch.Tensor | None) -> ShapeError:
    dtype = weight.dtype if isinstance(weight, torch.Tensor) else "out_dtype"
    return ShapeError(
        EMBEDDING.name,
        expected=f"out {[token_ids.shape[0], weight.shape[1]]} {dtype}",
        got="another out_dtype" if out is None else f"{list(out.shape)} {out.dtype}",
        fix="give out a row for each token and the right dtype: weight's, or for a quantized weight the one asked for",
    )


def _fake_embedding(token_ids: torch.Tensor, weight: torch.Tensor, solution: str | None = None) -> torch.Tensor:
    return weight.new_empty((token_ids.shape[0], weight.shape[1]))


def _run_embedding_scaled(
    token_ids: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    global_scale: torch.Tensor | None,
    zero_point: torch.Tensor | None,
    fmt: str,
    shape: list[int],
    out_dtype: torch.dtype,
    solution: str | None = None,
) -> torch.Tensor:
    table = QuantizedTensor(weight, Format.parse(fmt), tuple(shape), scale, global_scale, zero_point)
    return _run_embedding(token_ids, table, solution, None, out_dtype)


def _fake_embedding_scaled(
    token_ids: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    global_scale: torch.Tensor | None,
    zero_point: torch.Tensor | None,
    fmt: str,
    shape: list[int],
    out_dtype: torch.dtype,
    solution: str | None = None,
) -> torch.Tensor:
    return weight.new_empty((token_ids.shape[0], shape[1]), dtype=out_dtype)


_library_embedding = register_library_op(
    "embedding(Tensor token_ids, Tensor weight, str? solution=None) -> Tensor", _run_embedding, _fake_embedding
)
_library_embedding_scaled = register_library_op(
    "embedding_scaled(Tensor token_ids, Tensor weight, Tensor? scale, Tensor? global_scale, Tensor? zero_point, str format, "
    "SymInt[] shape, ScalarType out_dtype, str? solution=None) -> Tensor",
    _run_embedding_scaled,
    _fake_embedding_scaled,
)
