"""Public embedding ops: shapes are checked once, then the bound kernel is called."""

from __future__ import annotations

import torch
from torch.compiler import is_compiling

from tokenspeed_kernel.dispatch import BoundOp, register_library_op
from tokenspeed_kernel.errors import ShapeError
from tokenspeed_kernel.ops.embedding.contract import EMBEDDING

__all__ = ["embedding"]

_embedding = BoundOp(EMBEDDING)


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
    if token_ids.dim() != 1 or weight.dim() != 2:
        raise ShapeError(
            EMBEDDING.name,
            expected="token_ids [num_tokens] and weight [vocab, hidden]",
            got=f"token_ids {list(token_ids.shape)} and weight {list(weight.shape)}",
            fix="flatten token_ids",
        )
    if out is not None:
        wanted = (token_ids.shape[0], weight.shape[1])
        if out.shape != wanted or out.dtype is not weight.dtype:
            raise ShapeError(
                EMBEDDING.name,
                expected=f"out {list(wanted)} {weight.dtype}",
                got=f"{list(out.shape)} {out.dtype}",
                fix="give out a row for each token and weight's dtype",
            )
    kernel = _embedding.kernel(weight.device, (token_ids.dtype, weight.dtype), (), solution)
    result: torch.Tensor = kernel(token_ids, weight, out=out)
    return result


def _fake_embedding(token_ids: torch.Tensor, weight: torch.Tensor, solution: str | None = None) -> torch.Tensor:
    return weight.new_empty((token_ids.shape[0], weight.shape[1]))


_library_embedding = register_library_op(
    "embedding(Tensor token_ids, Tensor weight, str? solution=None) -> Tensor", _run_embedding, _fake_embedding
)
