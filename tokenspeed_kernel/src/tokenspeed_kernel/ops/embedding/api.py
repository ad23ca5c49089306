"""Public embedding ops: shapes are checked once, then the bound kernel is called."""

from __future__ import annotations

import torch
from torch.compiler import is_compiling

from tokenspeed_kernel.dispatch import BoundOp, check_devices, register_library_op
from tokenspeed_kernel.errors import ShapeError
from tokenspeed_kernel.ops.embedding.contract import EMBEDDING

__all__ = ["embedding"]

_embedding = BoundOp(EMBEDDING)
_embedding_table = _embedding.table


def embedding(
    token_ids: torch.Tensor,
    weight: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    solution: str | None = None,
) -> torch.Tensor:
    """Look up the row of each token.

    An id outside 0..vocab-1 gives a zero row: that is what a shard of a vocabulary needs, and what padding wants.

    Args:
        token_ids: [num_tokens] int32 or int64, any stride.
        weight: [vocab, hidden] fp32, bf16 or fp16, any strides.
        out: optional [num_tokens, hidden], dtype of weight, written in place.
        solution: solution or kernel to insist on; chosen by the registry where left out.
    Returns:
        out, or a new contiguous [num_tokens, hidden] of weight's dtype.
    Raises:
        ShapeError: shapes disagree.  NoKernelError: nothing qualifies.
    Source: Bengio et al., A Neural Probabilistic Language Model, JMLR 3 (2003), section 2 (the matrix C).
    """
    if is_compiling():
        result: torch.Tensor = _library_embedding(token_ids, weight, solution)
        return result if out is None else out.copy_(result)
    return _run_embedding(token_ids, weight, solution, out)


# The library op's implementation: a compiled graph calls it at run time, when nothing is being compiled any more.
def _run_embedding(
    token_ids: torch.Tensor, weight: torch.Tensor, solution: str | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    ids_shape, weight_shape, dtype = token_ids.shape, weight.shape, weight.dtype
    if len(ids_shape) != 1 or len(weight_shape) != 2:
        raise ShapeError(
            EMBEDDING.name,
            expected="token_ids [num_tokens] and weight [vocab, hidden]",
            got=f"token_ids {list(ids_shape)} and weight {list(weight_shape)}",
            fix="flatten token_ids",
        )
    if out is not None and out.shape != (ids_shape[0], weight_shape[1]):
        raise _out_error(token_ids, weight, out)
    ids_dtype = token_ids.dtype
    device, out_key = weight.device, None if out is None else (out.dtype, out.device)
    key = (device, token_ids.device, ids_dtype, dtype, out_key, solution)
    kernel = _embedding_table.get(key)
    if kernel is None:
        if out is not None and out.dtype is not dtype:
            raise _out_error(token_ids, weight, out)
        check_devices(EMBEDDING.name, device, token_ids=token_ids, out=out)
        kernel = _embedding.bind(key, device, (ids_dtype, dtype), (), solution)
    result: torch.Tensor = kernel(token_ids, weight, out=out)
    return result


def _out_error(token_ids: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> ShapeError:
    return ShapeError(
        EMBEDDING.name,
        expected=f"out {[token_ids.shape[0], weight.shape[1]]} {weight.dtype}",
        got=f"{list(out.shape)} {out.dtype}",
        fix="give out a row for each token and weight's dtype",
    )


def _fake_embedding(token_ids: torch.Tensor, weight: torch.Tensor, solution: str | None = None) -> torch.Tensor:
    return weight.new_empty((token_ids.shape[0], weight.shape[1]))


_library_embedding = register_library_op(
    "embedding(Tensor token_ids, Tensor weight, str? solution=None) -> Tensor", _run_embedding, _fake_embedding
)
