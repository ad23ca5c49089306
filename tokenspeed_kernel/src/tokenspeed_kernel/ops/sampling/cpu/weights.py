"""Weights of tokens as integers, the filters on them, and the draw.

The weight of a token is exp((logit - max) / temperature) in units of 2**-40, cut to an integer. Integer sums do not depend on the
order of summation: so a row's draw does not depend on the other rows, on the number of threads, or on the vector width.
A token whose probability is below 2**-40 of the most likely token's is never drawn.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel.ops.sampling.cpu.workspace import WORKSPACE

SCALE = 2.0**40
_BINS_PER_NAT = 64.0
_NUM_BINS = 1792  # 28 nats: exp(-28) is below 2**-40
_SUM_BLOCK = 128
_INFINITY = float("inf")


def log_ratios(values: Tensor, top: Tensor, temperature: Tensor) -> Tensor:
    """(logit - max) / temperature, in nats; never positive, -inf for a logit of -inf. The workspace's "log_ratio"."""
    result = WORKSPACE.take("log_ratio", tuple(values.shape), torch.float32)
    return torch.sub(values, top[:, None], out=result).mul_(temperature.reciprocal()[:, None])


def integer_weights(log_ratio: Tensor) -> Tensor:
    """exp(log_ratio) in units of 1 / SCALE, int64. The workspace's "weights"."""
    shape = tuple(log_ratio.shape)
    scaled = torch.exp(log_ratio, out=WORKSPACE.take("float", shape, torch.float32)).mul_(SCALE)
    return WORKSPACE.take("weights", shape, torch.int64).copy_(scaled)


def mass_target(total: Tensor, top_p: Tensor) -> Tensor:
    """Least mass that the nucleus must reach, at least one unit; int64."""
    target = (top_p.double() * total.double()).ceil_().to(torch.int64).clamp_(min=1)
    return torch.where(top_p < 1, target, torch.iinfo(torch.int64).max)


def drop_below_min_p(weights: Tensor, log_ratio: Tensor, min_p: Tensor) -> None:
    """Set to zero, in place, the weight of tokens less likely than `min_p` times the most likely one."""
    limit = min_p.clamp(min=0).log()  # min_p 0: -inf; 1: zero, which only tokens equal to the most likely one meet
    weights.masked_fill_(log_ratio < limit[:, None], 0)


def drop_after_prefix(values: Tensor, log_ratio: Tensor, weights: Tensor, target: Tensor, *, by_count: bool) -> None:
    """Set to zero, in place, the weight of every token after the shortest prefix of the total order that reaches `target`.

    A histogram over the log-ratio finds the bin in which the target is reached; only the tokens in that bin are sorted.

    Args:
        values: [R, V] logits.
        log_ratio: [R, V] from `log_ratios`.
        weights: [R, V] int64; changed.
        target: [R] int64; a row whose total stays below it is left alone.
        by_count: measure a prefix by the number of its tokens that have a weight; else by their mass.
    """
    measure = (weights > 0).to(torch.int64) if by_count else weights
    shape = tuple(values.shape)
    scaled = torch.mul(log_ratio, -_BINS_PER_NAT, out=WORKSPACE.take("float", shape, torch.float32))
    bins = WORKSPACE.take("bins", shape, torch.int64).copy_(scaled.clamp_(max=_NUM_BINS - 1))
    cumulative = torch.zeros(len(values), _NUM_BINS, dtype=torch.int64).scatter_add_(1, bins, measure).cumsum_(1)
    found = torch.searchsorted(cumulative, target[:, None])[:, 0]
    before = cumulative.gather(1, (found - 1).clamp_(min=0)[:, None])[:, 0].masked_fill_(found == 0, 0)

    rows, ids = (bins == found[:, None]).nonzero(as_tuple=True)
    order = values[rows, ids].sort(descending=True, stable=True).indices  # ids ascend among equal logits
    order = order[rows[order].sort(stable=True).indices]
    rows, ids = rows[order], ids[order]
    running = measure[rows, ids].cumsum(0)
    starts = torch.searchsorted(rows, torch.arange(len(values)))
    skipped = torch.cat((running.new_zeros(1), running))[starts]
    late = running - skipped[rows] + before[rows] - measure[rows, ids] >= target[rows]
    weights[rows[late], ids[late]] = 0
    weights.masked_fill_(bins > found[:, None], 0)


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """Column [R] at which the running sum of each row first exceeds `uniform` times its total.

    Whole blocks are summed first, so that only one block of each row needs a running sum.
    """
    size = weights.shape[1]
    whole = size // _SUM_BLOCK * _SUM_BLOCK
    sums = [weights[:, :whole].unfold(1, _SUM_BLOCK, _SUM_BLOCK).sum(-1)] if whole else []
    if whole < size:
        sums.append(weights[:, whole:].sum(-1, keepdim=True))
    cumulative = torch.cat(sums, dim=1).cumsum_(1)
    total = cumulative[:, -1]
    # The product of two doubles may round up to the total.
    mark = torch.minimum((uniform * total.double()).to(torch.int64), total - 1)[:, None]
    block = torch.searchsorted(cumulative, mark, right=True)
    mark = mark - cumulative.gather(1, (block - 1).clamp_(min=0)).masked_fill_(block == 0, 0)
    columns = block * _SUM_BLOCK + torch.arange(_SUM_BLOCK)
    members = weights.gather(1, columns.clamp(max=size - 1)).masked_fill_(columns >= size, 0)
    inside = torch.searchsorted(members.cumsum_(1), mark, right=True)
    return (block * _SUM_BLOCK + inside)[:, 0]
