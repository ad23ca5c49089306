"""The truth for the collectives: every process broadcasts what it has, and each works the result out alone, sums in float64."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

__all__ = ["all_gather", "all_reduce", "all_reduce_add_rms_norm", "all_to_all", "reduce_scatter"]


def all_reduce(x: torch.Tensor, group: ProcessGroup, *, reduce: str = "sum", out: torch.Tensor | None = None) -> torch.Tensor:
    """See `tokenspeed_kernel.ops.comm.all_reduce`."""
    result = _combined(x, group, reduce)
    return result if out is None else out.copy_(result)


def reduce_scatter(
    x: torch.Tensor,
    group: ProcessGroup,
    *,
    reduce: str = "sum",
    sizes: tuple[int, ...] | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `tokenspeed_kernel.ops.comm.reduce_scatter`."""
    counts = sizes or (x.shape[0] // group.size(),) * group.size()
    start = sum(counts[: group.rank()])
    result = _combined(x, group, reduce)[start : start + counts[group.rank()]].clone()
    return result if out is None else out.copy_(result)


def all_gather(
    x: torch.Tensor, group: ProcessGroup, *, sizes: tuple[int, ...] | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """See `tokenspeed_kernel.ops.comm.all_gather`."""
    counts = sizes or (x.shape[0],) * group.size()
    result = torch.cat(_everyones(x, group, [(count, *x.shape[1:]) for count in counts]))
    return result if out is None else out.copy_(result)


def all_to_all(
    x: torch.Tensor,
    group: ProcessGroup,
    *,
    send_sizes: tuple[int, ...] | None = None,
    receive_sizes: tuple[int, ...] | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `tokenspeed_kernel.ops.comm.all_to_all`."""
    world_size, rank = group.size(), group.rank()
    mine = torch.tensor(send_sizes or (x.shape[0] // world_size,) * world_size, device=x.device)
    sent = [one.tolist() for one in _everyones(mine, group, [mine.shape] * world_size)]
    everyone = _everyones(x, group, [(sum(counts), *x.shape[1:]) for counts in sent])
    starts = [sum(counts[:rank]) for counts in sent]
    parts = [one[start : start + counts[rank]] for one, start, counts in zip(everyone, starts, sent, strict=True)]
    result = torch.cat(parts)
    return result if out is None else out.copy_(result)


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
    total = (_combined(x, group, "sum").double() + residual.double()).to(x.dtype).contiguous()
    exact = total.double()
    normed = (exact / torch.sqrt(exact.square().mean(-1, keepdim=True) + eps) * weight.double()).to(x.dtype)
    return (normed if out is None else out.copy_(normed), total if residual_out is None else residual_out.copy_(total))


def _everyones(x: torch.Tensor, group: ProcessGroup, shapes: list[tuple[int, ...]]) -> list[torch.Tensor]:
    """Each process's tensor, in order of rank. Broadcasts of bytes: another way than the collectives that are tested."""
    copies = []
    for rank, shape in enumerate(shapes):
        if rank == group.rank():
            copy = x.clone(memory_format=torch.contiguous_format)
        else:
            copy = torch.empty(shape, dtype=x.dtype, device=x.device)
        if copy.numel():
            dist.broadcast(copy.view(-1).view(torch.uint8), dist.get_global_rank(group, rank), group=group)
        copies.append(copy)
    return copies


def _combined(x: torch.Tensor, group: ProcessGroup, reduce: str) -> torch.Tensor:
    everyone = torch.stack(_everyones(x, group, [tuple(x.shape)] * group.size()))
    if reduce != "sum":
        return everyone.amax(0) if reduce == "max" else everyone.amin(0)
    # Integers wrap as the back ends' do; in float64 large ones would be rounded.
    return (everyone.double().sum(0) if x.is_floating_point() else everyone.sum(0, dtype=x.dtype)).to(x.dtype)
