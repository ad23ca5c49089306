"""Public collectives that move rows as they are: shapes are checked once, then the bound kernel is called."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.compiler import is_compiling

from tokenspeed_kernel.dispatch import NEW_CALL, BoundOp, register_library_op
from tokenspeed_kernel.errors import ShapeError
from tokenspeed_kernel.ops.comm.checks import even_share, require_out, require_sizes
from tokenspeed_kernel.ops.comm.contract import ALL_GATHER, ALL_TO_ALL
from tokenspeed_kernel.ops.comm.group import Group, group_name, resolve_group
from tokenspeed_kernel.ops.operands import OPERAND_ERRORS, refuse_kinds

__all__ = ["all_gather", "all_to_all"]

_all_gather = BoundOp(ALL_GATHER)
_all_to_all = BoundOp(ALL_TO_ALL)
_Counts = tuple[int, ...]


def all_gather(
    x: torch.Tensor,
    group: Group = None,
    *,
    sizes: Sequence[int] | None = None,
    out: torch.Tensor | None = None,
    solution: str | None = None,
) -> torch.Tensor:
    """Concatenate the rows of every process's x in order of rank; each gets the whole.

    Args:
        x: [rows of this process, ...], any dtype (fp8 included: bits are copied), any strides.
        group: process group, its name, or None for all processes.
        sizes: rows of each process, the same list on each; where left out, every process has as many rows as this one.
        out: optional [rows of all processes, ...], dtype of x, written in place; it must not overlap x.
        solution: solution or kernel to insist on; chosen by the registry where left out.
    Returns:
        out, or a new contiguous tensor.
    Raises:
        ShapeError: x has not the rows that sizes gives this process; out does not fit.  GroupError: no such group.
        NoKernelError: nothing qualifies.
    Source: MPI: A Message-Passing Interface Standard, section "Gather-to-all" (MPI_Allgatherv).
    """
    if is_compiling():
        counts = None if sizes is None else list(sizes)
        result: torch.Tensor = _library_all_gather(x, group_name(ALL_GATHER.name, group), counts, solution)
        return result if out is None else out.copy_(result)
    try:
        return _run_all_gather(x, group, sizes, solution, out)
    except OPERAND_ERRORS as error:
        refuse_kinds(all_gather, locals(), error)
        raise


def all_to_all(
    x: torch.Tensor,
    group: Group = None,
    *,
    send_sizes: Sequence[int] | None = None,
    receive_sizes: Sequence[int] | None = None,
    out: torch.Tensor | None = None,
    solution: str | None = None,
) -> torch.Tensor:
    """Send a share of the rows of x to each process, and concatenate what each sends here, both in order of rank.

    Args:
        x: [num_rows, ...], any dtype (fp8 included: bits are copied), any strides.
        group: process group, its name, or None for all processes.
        send_sizes: rows for each process; their sum is num_rows. Equal shares where both lists are left out.
        receive_sizes: rows from each process: what that process has in its send_sizes for this one.
        out: optional [rows received, ...], dtype of x, written in place; it must not overlap x.
        solution: solution or kernel to insist on; chosen by the registry where left out.
    Returns:
        out, or a new contiguous tensor.
    Raises:
        ShapeError: num_rows is not a multiple of the group's size (without sizes) or not the sum of send_sizes; one list is given
            without the other; the two differ in what this process sends to itself; out does not fit.
        GroupError: no such group.  NoKernelError: nothing qualifies.
    Source: MPI: A Message-Passing Interface Standard, section "All-to-All Scatter/Gather" (MPI_Alltoallv).
    """
    if is_compiling():
        send = None if send_sizes is None else list(send_sizes)
        receive = None if receive_sizes is None else list(receive_sizes)
        result: torch.Tensor = _library_all_to_all(x, group_name(ALL_TO_ALL.name, group), send, receive, solution)
        return result if out is None else out.copy_(result)
    try:
        return _run_all_to_all(x, group, send_sizes, receive_sizes, solution, out)
    except OPERAND_ERRORS as error:
        refuse_kinds(all_to_all, locals(), error)
        raise


def _gathered(x: torch.Tensor, sizes: Sequence[int] | None, rank: int, world_size: int) -> tuple[_Counts | None, tuple[int, ...]]:
    """The row counts where they differ, and the shape of the whole."""
    op, shape = ALL_GATHER.name, x.shape
    if not shape:
        raise ShapeError(op, expected="x [num_rows, ...]", got="a scalar", fix="pass x.reshape(1)")
    if sizes is None:
        return None, (shape[0] * world_size, *shape[1:])
    counts = require_sizes(op, "sizes", sizes, world_size)
    if counts[rank] != shape[0]:
        raise ShapeError(op, expected=f"x with {counts[rank]} rows, as sizes has it for rank {rank}", got=f"{shape[0]} rows")
    return (counts if len(set(counts)) > 1 else None), (sum(counts), *shape[1:])


# The library op's implementation: a compiled graph calls it at run time, when nothing is being compiled any more.
def _run_all_gather(
    x: torch.Tensor,
    group: Group,
    sizes: Sequence[int] | None = None,
    solution: str | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    device = x.device
    found, backend, world_size = resolve_group(ALL_GATHER.name, group, device)
    operands = (x,) if out is None else (x, out)
    key = (x.shape, backend, world_size, out is None, solution)
    looks_same, kernel = _all_gather.seen.get(key, NEW_CALL)
    counts = None
    if sizes is not None or not looks_same(*operands):  # lists of counts are looked at each time
        counts, shape = _gathered(x, sizes, found.rank(), world_size)
        if out is not None:
            require_out(ALL_GATHER.name, "out", out, shape, x)
        kernel = _all_gather.kernel(device, (x.dtype,), (backend, world_size, counts is not None), solution)
        if sizes is None:
            _all_gather.remember(key, kernel, *operands)
    result: torch.Tensor = kernel(x, found, counts, out)
    return result


def _fake_all_gather(x: torch.Tensor, group: str, sizes: list[int] | None = None, solution: str | None = None) -> torch.Tensor:
    found, _, world_size = resolve_group(ALL_GATHER.name, group, x.device)
    return x.new_empty(_gathered(x, sizes, found.rank(), world_size)[1])


def _exchanged(
    x: torch.Tensor,
    send_sizes: Sequence[int] | None,
    receive_sizes: Sequence[int] | None,
    rank: int,
    world_size: int,
) -> tuple[_Counts | None, _Counts | None, tuple[int, ...]]:
    """Both lists of row counts where they are not all equal, and the shape of what is received."""
    op, shape = ALL_TO_ALL.name, x.shape
    if not shape:
        raise ShapeError(op, expected="x [num_rows, ...]", got="a scalar")
    if send_sizes is None and receive_sizes is None:
        even_share(op, shape[0], world_size, "send_sizes and receive_sizes")
        return None, None, tuple(shape)
    if send_sizes is None or receive_sizes is None:
        given = "receive_sizes" if send_sizes is None else "send_sizes"
        raise ShapeError(op, expected="send_sizes and receive_sizes together", got=f"{given} alone")
    send = require_sizes(op, "send_sizes", send_sizes, world_size)
    receive = require_sizes(op, "receive_sizes", receive_sizes, world_size)
    if sum(send) != shape[0]:
        raise ShapeError(op, expected=f"x with {sum(send)} rows, the sum of send_sizes", got=f"{shape[0]} rows")
    if send[rank] != receive[rank]:
        raise ShapeError(
            op,
            expected=f"send_sizes[{rank}] equal to receive_sizes[{rank}]: rank {rank} to itself",
            got=f"{send[rank]} and {receive[rank]}",
        )
    # Whether other processes have equal shares cannot be seen here: all of them take the way of the lists.
    return send, receive, (sum(receive), *shape[1:])


def _run_all_to_all(
    x: torch.Tensor,
    group: Group,
    send_sizes: Sequence[int] | None = None,
    receive_sizes: Sequence[int] | None = None,
    solution: str | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    device = x.device
    found, backend, world_size = resolve_group(ALL_TO_ALL.name, group, device)
    operands = (x,) if out is None else (x, out)
    key = (x.shape, backend, world_size, out is None, solution)
    looks_same, kernel = _all_to_all.seen.get(key, NEW_CALL)
    send = receive = None
    even = send_sizes is None and receive_sizes is None
    if not even or not looks_same(*operands):  # lists of counts are looked at each time
        send, receive, shape = _exchanged(x, send_sizes, receive_sizes, found.rank(), world_size)
        if out is not None:
            require_out(ALL_TO_ALL.name, "out", out, shape, x)
        kernel = _all_to_all.kernel(device, (x.dtype,), (backend, world_size, send is not None), solution)
        if even:
            _all_to_all.remember(key, kernel, *operands)
    result: torch.Tensor = kernel(x, found, send, receive, out)
    return result


def _fake_all_to_all(
    x: torch.Tensor,
    group: str,
    send_sizes: list[int] | None = None,
    receive_sizes: list[int] | None = None,
    solution: str | None = None,
) -> torch.Tensor:
    found, _, world_size = resolve_group(ALL_TO_ALL.name, group, x.device)
    return x.new_empty(_exchanged(x, send_sizes, receive_sizes, found.rank(), world_size)[2])


_library_all_gather = register_library_op(
    "all_gather(Tensor x, str group, int[]? sizes=None, str? solution=None) -> Tensor", _run_all_gather, _fake_all_gather
)
_library_all_to_all = register_library_op(
    "all_to_all(Tensor x, str group, int[]? send_sizes=None, int[]? receive_sizes=None, str? solution=None) -> Tensor",
    _run_all_to_all,
    _fake_all_to_all,
)
