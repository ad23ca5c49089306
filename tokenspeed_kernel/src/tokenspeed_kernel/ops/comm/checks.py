"""Checks that the collectives share. A process sees its own sizes alone: it cannot tell that another one calls with other ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tokenspeed_kernel.errors import ShapeError

__all__ = ["even_share", "require_out", "require_reduce", "require_sizes"]


def require_sizes(op: str, name: str, sizes: Sequence[int], world_size: int) -> tuple[int, ...]:
    """Return the row counts as a tuple.

    Raises:
        ShapeError: not one count for each process, or a negative one.
    """
    counts = tuple(sizes)
    if len(counts) != world_size or any(count < 0 for count in counts):
        raise ShapeError(op, expected=f"{name} with {world_size} row counts, one for each process", got=str(list(counts)))
    return counts


def even_share(op: str, num_rows: int, world_size: int, parameter: str) -> int:
    """Return the rows of each process.

    Raises:
        ShapeError: the rows cannot be divided evenly.
    """
    if num_rows % world_size:
        raise ShapeError(
            op,
            expected=f"x with a multiple of {world_size} rows, the size of the group",
            got=f"{num_rows} rows",
            fix=f"pass {parameter}, or pad x",
        )
    return num_rows // world_size


def require_out(op: str, name: str, out: torch.Tensor, shape: tuple[int, ...], like: torch.Tensor) -> None:
    """Raise ShapeError unless `out` has the shape, and dtype and device of `like`."""
    if out.shape != shape or out.dtype is not like.dtype or out.device != like.device:
        raise ShapeError(
            op,
            expected=f"{name} {list(shape)} {like.dtype} on {like.device}",
            got=f"{list(out.shape)} {out.dtype} on {out.device}",
        )


def require_reduce(op: str, reduce: str, known: tuple[str, ...]) -> None:
    """Raise ShapeError unless the reduction is known."""
    if reduce not in known:
        raise ShapeError(op, expected=f"reduce in {', '.join(known)}", got=repr(reduce))
