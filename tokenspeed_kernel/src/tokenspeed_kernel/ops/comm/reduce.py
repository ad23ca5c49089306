"""Public collectives that combine elements: shapes are checked once, then the bound kernel is called."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.compiler import is_compiling

from tokenspeed_kernel.dispatch import NEW_CALL, BoundOp, register_library_op
from tokenspeed_kernel.errors import ShapeError
from tokenspeed_kernel.ops.comm.checks import even_share, require_out, require_reduce, require_sizes
from tokenspeed_kernel.ops.comm.contract import ALL_REDUCE, REDUCE_SCATTER, REDUCTIONS
from tokenspeed_kernel.ops.comm.group import Group, group_name, resolve_group
from tokenspeed_kernel.ops.operands import OPERAND_ERRORS, refuse_kinds

__all__ = ["all_reduce", "reduce_scatter"]

_all_reduce = BoundOp(ALL_REDUCE)
_reduce_scatter = BoundOp(REDUCE_SCATTER)


def all_reduce(
    x: torch.Tensor,
    group: Group = None,
    *,
    reduce: str = "sum",
    out: torch.Tensor | None = None,
    solution: str | None = None,
) -> torch.Tensor:
    """Combine every process's x, element by element; each gets the whole result.

    Args:
        x: any shape, the same on each process; fp32, fp64, bf16, fp16, int64, int32, int8 or uint8, any strides.
        group: process group, its name, or None for all processes.
        reduce: `sum`, `max` or `min`.
        out: optional, shape and dtype of x, written in place; it may be x.
        solution: solution or kernel to insist on; chosen by the registry where left out.
    Returns:
        out, or a new contiguous tensor of x's shape and dtype; the same bits on every process.
    Raises:
        ShapeError: shapes or dtypes disagree.  GroupError: no such group.  NoKernelError: nothing qualifies.
    Source: MPI: A Message-Passing Interface Standard, section "Global Reduction Operations" (MPI_Allreduce).
    """
    if is_compiling():
        result: torch.Tensor = _library_all_reduce(x, group_name(ALL_REDUCE.name, group), reduce, solution)
        return result if out is None else out.copy_(result)
    try:
        return _run_all_reduce(x, group, reduce, solution, out)
    except OPERAND_ERRORS as error:
        refuse_kinds(all_reduce, locals(), error)
        raise


def reduce_scatter(
    x: torch.Tensor,
    group: Group = None,
    *,
    reduce: str = "sum",
    sizes: Sequence[int] | None = None,
    out: torch.Tensor | None = None,
    solution: str | None = None,
) -> torch.Tensor:
    """Combine every process's x, element by element; each gets its share of the rows, the first process the first rows.

    Args:
        x: [num_rows, ...], the same shape on each process; dtypes as in `all_reduce`, any strides.
        group: process group, its name, or None for all processes.
        reduce: `sum`, `max` or `min`.
        sizes: rows for each process, the same list on each; their sum is num_rows. Equal shares where left out.
        out: optional [rows of this process, ...], dtype of x, written in place; it must not overlap x.
        solution: solution or kernel to insist on; chosen by the registry where left out.
    Returns:
        out, or a new contiguous tensor.
    Raises:
        ShapeError: num_rows is not a multiple of the group's size (without sizes) or not the sum of sizes; out does not fit.
        GroupError: no such group.  NoKernelError: nothing qualifies.
    Source: MPI: A Message-Passing Interface Standard, section "Reduce-Scatter" (MPI_Reduce_scatter).
    """
    if is_compiling():
        counts = None if sizes is None else list(sizes)
        name = group_name(REDUCE_SCATTER.name, group)
        result: torch.Tensor = _library_reduce_scatter(x, name, reduce, counts, solution)
        return result if out is None else out.copy_(result)
    try:
        return _run_reduce_scatter(x, group, reduce, sizes, solution, out)
    except OPERAND_ERRORS as error:
        refuse_kinds(reduce_scatter, locals(), error)
        raise


# The library op's implementation: a compiled graph calls it at run time, when nothing is being compiled any more.
def _run_all_reduce(
    x: torch.Tensor,
    group: Group,
    reduce: str = "sum",
    solution: str | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    device = x.device
    found, backend, world_size = resolve_group(ALL_REDUCE.name, group, device)
    operands = (x,) if out is None else (x, out)
    key = (x.shape, backend, world_size, reduce, out is None, solution)
    looks_same, kernel = _all_reduce.seen.get(key, NEW_CALL)
    if not looks_same(*operands):
        require_reduce(ALL_REDUCE.name, reduce, REDUCTIONS)
        if out is not None:
            require_out(ALL_REDUCE.name, "out", out, x.shape, x)
        kernel = _all_reduce.kernel(device, (x.dtype,), (backend, world_size, reduce), solution)
        _all_reduce.remember(key, kernel, *operands)
    result: torch.Tensor = kernel(x, found, reduce, out)
    return result


def _fake_all_reduce(x: torch.Tensor, group: str, reduce: str = "sum", solution: str | None = None) -> torch.Tensor:
    return x.new_empty(x.shape)


def _share(
    x: torch.Tensor, sizes: Sequence[int] | None, rank: int, world_size: int
) -> tuple[tuple[int, ...] | None, tuple[int, ...]]:
    """The row counts where they differ, and the shape of this process's share."""
    op, shape = REDUCE_SCATTER.name, x.shape
    if not shape:
        raise ShapeError(op, expected="x [num_rows, ...]", got="a scalar")
    if sizes is None:
        return None, (even_share(op, shape[0], world_size, "sizes"), *shape[1:])
    counts = require_sizes(op, "sizes", sizes, world_size)
    if sum(counts) != shape[0]:
        raise ShapeError(op, expected=f"x with {sum(counts)} rows, the sum of sizes", got=f"{shape[0]} rows")
    return (counts if len(set(counts)) > 1 else None), (counts[rank], *shape[1:])


def _run_reduce_scatter(
    x: torch.Tensor,
    group: Group,
    reduce: str = "sum",
    sizes: Sequence[int] | None = None,
    solution: str | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    device = x.device
    found, backend, world_size = resolve_group(REDUCE_SCATTER.name, group, device)
    operands = (x,) if out is None else (x, out)
    key = (x.shape, backend, world_size, reduce, out is None, solution)
    looks_same, kernel = _reduce_scatter.seen.get(key, NEW_CALL)
    counts = None
    if sizes is not None or not looks_same(*operands):  # lists of counts are looked at each time
        require_reduce(REDUCE_SCATTER.name, reduce, REDUCTIONS)
        counts, shape = _share(x, sizes, found.rank(), world_size)
        if out is not None:
            require_out(REDUCE_SCATTER.name, "out", out, shape, x)
        kernel = _reduce_scatter.kernel(device, (x.dtype,), (backend, world_size, reduce, counts is not None), solution)
        if sizes is None:
            _reduce_scatter.remember(key, kernel, *operands)
    result: torch.Tensor = kernel(x, found, reduce, counts, out)
    return result


def _fake_reduce_scatter(
    x: torch.Tensor, group: str, reduce: str = "sum", sizes: list[int] | None = None, solution: str | None = None
) -> torch.Tensor:
    found, _, world_size = resolve_group(REDUCE_SCATTER.name, group, x.device)
    return x.new_empty(_share(x, sizes, found.rank(), world_size)[1])


_library_all_reduce = register_library_op(
    'all_reduce(Tensor x, str group, str reduce="sum", str? solution=None) -> Tensor', _run_all_reduce, _fake_all_reduce
)
_library_reduce_scatter = register_library_op(
    'reduce_scatter(Tensor x, str group, str reduce="sum", int[]? sizes=None, str? solution=None) -> Tensor',
    _run_reduce_scatter,
    _fake_reduce_scatter,
)
