"""Errors that the norm ops share."""

from __future__ import annotations

import torch

from tokenspeed_kernel.errors import ShapeError

__all__ = ["check_dtypes", "like_error", "weight_error"]


def weight_error(op: str, x: torch.Tensor, weight: torch.Tensor, name: str = "weight") -> ShapeError:
    """The error for a weight (or bias) that does not fit x's last dimension."""
    return ShapeError(
        op,
        expected=f"x [..., hidden] and {name} [hidden]",
        got=f"x {list(x.shape)} and {name} {list(weight.shape)}",
        fix=f"give {name} one element for each of x's last dimension",
    )


def like_error(op: str, name: str, x: torch.Tensor, got: torch.Tensor) -> ShapeError:
    """The error for an operand that should have x's shape and dtype."""
    return ShapeError(
        op,
        expected=f"{name} {list(x.shape)} {x.dtype}",
        got=f"{list(got.shape)} {got.dtype}",
        fix=f"give {name} the shape and dtype of x",
    )


def check_dtypes(op: str, x: torch.Tensor, **others: torch.Tensor | None) -> None:
    """Refuse operands of another dtype than x's. Only when a kernel is bound: these dtypes are in the table's key.

    Raises:
        ShapeError: a dtype differs.
    """
    for name, other in others.items():
        if other is not None and other.dtype is not x.dtype:
            raise like_error(op, name, x, other)
