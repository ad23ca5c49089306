"""The collectives through torch.distributed: Gloo, NCCL, and whatever else a group was made with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from tokenspeed_kernel.ops.norm import fused_add_rms_norm

__all__ = ["all_gather", "all_reduce", "all_reduce_add_rms_norm", "all_to_all", "reduce_scatter"]

_REDUCE: dict[str, Any] = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
# torch 2.13 warns when it is called by the older names.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def all_reduce(x: torch.Tensor, group: ProcessGroup, *, reduce: str = "sum", out: torch.Tensor | None = None) -> torch.Tensor:
    """See `tokenspeed_kernel.ops.comm.all_reduce`."""
    if out is not None and out.is_contiguous():
        result = out if out is x else out.copy_(x)
    else:
        result = x.clone(memory_format=torch.contiguous_format)
    if result.numel():
        dist.all_reduce(result, op=_REDUCE[reduce], group=group)
    return result if out is None or result is out else out.copy_(result)


def reduce_scatter(
    x: torch.Tensor,
    group: ProcessGroup,
    *,
    reduce: str = "sum",
    sizes: tuple[int, ...] | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `tokenspeed_kernel.ops.comm.reduce_scatter`."""
    row, world_size = x.shape[1:], group.size()
    if sizes is None:
        result = _dense(out, (x.shape[0] // world_size, *row), x)
        if x.numel():
            _reduce_scatter(result, x.contiguous(), op=_REDUCE[reduce], group=group)
    else:
        # Shares of one size travel: each is padded to the largest.
        largest = max(sizes)
        padded = x.new_zeros((world_size, largest, *row))
        for slot, part in zip(padded, torch.split(x, list(sizes)), strict=True):
            slot[: part.shape[0]] = part
        share = x.new_empty((largest, *row))
        if share.numel():
            _reduce_scatter(share, padded.flatten(0, 1), op=_REDUCE[reduce], group=group)
        result = share[: sizes[group.rank()]]
    return result if out is None or result is out else out.copy_(result)


def all_gather(
    x: torch.Tensor, group: ProcessGroup, *, sizes: tuple[int, ...] | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """See `tokenspeed_kernel.ops.comm.all_gather`."""
    row, world_size = x.shape[1:], group.size()
    if sizes is None:
        result = _dense(out, (x.shape[0] * world_size, *row), x)
        if x.numel():
            _all_gather(_movable(result), _movable(x.contiguous()), group=group)
        return result if out is None or result is out else out.copy_(result)
    largest = max(sizes)
    padded = x.new_empty((largest, *row))
    padded[: x.shape[0]] = x
    everyone = x.new_empty((world_size, largest, *row))
    if padded.numel():
        _all_gather(_movable(everyone.flatten(0, 1)), _movable(padded), group=group)
    result = x.new_empty((sum(sizes), *row)) if out is None else out
    for target, part, size in zip(torch.split(result, list(sizes)), everyone, sizes, strict=True):
        target.copy_(part[:size])
    return result


def all_to_all(
    x: torch.Tensor,
    group: ProcessGroup,
    *,
    send_sizes: tuple[int, ...] | None = None,
    receive_sizes: tuple[int, ...] | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `tokenspeed_kernel.ops.comm.all_to_all`."""
    num_rows = x.shape[0] if receive_sizes is None else sum(receive_sizes)
    result = _dense(out, (num_rows, *x.shape[1:]), x)
    send = None if send_sizes is None else list(send_sizes)
    receive = None if receive_sizes is None else list(receive_sizes)
    # With lists, others may have rows for each other where this process has none: it must take part.
    row_is_empty = 0 in x.shape[1:]
    if not row_is_empty and (x.shape[0] or send is not None):
        dist.all_to_all_single(_movable(result), _movable(x.contiguous()), receive, send, group=group)
    return result if out is None or result is out else out.copy_(result)


def all_reduce_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    group: ProcessGroup,
    *,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `tokenspeed_kernel.ops.comm.all_reduce_add_rms_norm`."""
    total = all_reduce(x, group, out=out)
    # Row by row the norm reads before it writes, so that `out` may hold the sum.
    return fused_add_rms_norm(total, residual, weight, eps=eps, out=total, residual_out=residual_out)


def _dense(out: torch.Tensor | None, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """`out` where a back end can write into it, else a new tensor."""
    return out if out is not None and out.is_contiguous() else like.new_empty(shape)


def _movable(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory in a dtype that every back end moves: Gloo and NCCL know no fp8."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
