"""Sampling on the CPU: rows are grouped by the work that they need, and each group is done at once."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tokenspeed_kernel.ops.sampling.contract import GREEDY_TEMPERATURE, INVALID_TOKEN
from tokenspeed_kernel.ops.sampling.cpu import order, weights

_MAX_SMALL_K = 256  # up to here the k candidates are picked out; above, one histogram pass over the row is cheaper
_MAX_ROWS = 64  # rows at a time for what reads the logits alone
_MAX_WEIGHTS = 2**18  # weights of whole rows at a time: the workspace holds 24 bytes for each, and stays near the caches


def cpu_argmax(logits: Tensor, out: Tensor) -> Tensor:
    """Id of the largest logit of each row, the lowest of equal ones; see the api."""
    if not len(logits):
        return out
    top, ids = order.first(logits.float())
    ids = ids.to(torch.int32).masked_fill_(~top.isfinite(), INVALID_TOKEN)
    return out.copy_(ids)


def cpu_sample(
    logits: Tensor,
    uniform: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    out: Tensor,
) -> Tensor:
    """Inverse of the cumulative distribution in order of ids; see the api."""
    for start in range(0, len(logits), _MAX_ROWS):
        rows = slice(start, start + _MAX_ROWS)
        values = logits[rows].float()
        top, best = order.first(values)
        tokens = best.masked_fill(~top.isfinite(), INVALID_TOKEN)
        parameters = (temperature[rows], top_k[rows], top_p[rows], min_p[rows])
        for members, masses, ids in _filtered(values, top, *parameters):
            columns = weights.draw(masses, uniform[rows][members])
            tokens[members] = columns if ids is None else ids.gather(1, columns[:, None])[:, 0]
        out[rows] = tokens.to(torch.int32)
    return out


def cpu_sampling_probs(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, out: Tensor) -> Tensor:
    """The distribution that `sample` draws from, as float32; see the api."""
    out.zero_()
    for start in range(0, len(logits), _MAX_ROWS):
        rows = slice(start, start + _MAX_ROWS)
        values, probabilities = logits[rows].float(), out[rows]
        top, best = order.first(values)
        probabilities.scatter_(1, best[:, None], 1.0)
        for members, masses, ids in _filtered(values, top, temperature[rows], top_k[rows], top_p[rows], min_p[rows]):
            shares = (masses / masses.sum(-1, keepdim=True, dtype=torch.float64)).float()
            columns = torch.arange(values.shape[1]).expand_as(shares) if ids is None else ids
            probabilities[members] = torch.zeros(len(members), values.shape[1]).scatter_(1, columns, shares)
        probabilities.masked_fill_(~top.isfinite()[:, None], float("nan"))
    return out


def distributions(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (rows, [rows, V] fp64 distribution that `sample` draws from), every row once but those that cannot be sampled."""
    for start in range(0, len(logits), _MAX_ROWS):
        rows = slice(start, start + _MAX_ROWS)
        values = logits[rows].float()
        top, best = order.first(values)
        greedy = top.isfinite()
        for members, masses, ids in _filtered(values, top, temperature[rows], top_k[rows], top_p[rows], min_p[rows]):
            shares = masses.double()
            shares /= shares.sum(-1, keepdim=True)
            if ids is not None:
                shares = torch.zeros(len(members), values.shape[1], dtype=torch.float64).scatter_(1, ids, shares)
            greedy[members] = False
            yield members + start, shares
        members = greedy.nonzero()[:, 0]
        if members.numel():
            one_hot = torch.zeros(len(members), values.shape[1], dtype=torch.float64)
            yield members + start, one_hot.scatter_(1, best[members][:, None], 1.0)


def _filtered(
    values: Tensor, top: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """Yield (rows, integer weights after the filters, ids of their columns or None for all ids).

    Greedy rows and rows that cannot be sampled are left out.
    """
    vocab_size = values.shape[1]
    drawn = top.isfinite() & (temperature > GREEDY_TEMPERATURE) & (top_k != 1) & (top_p > 0)
    small = drawn & (top_k > 0) & (top_k <= min(_MAX_SMALL_K, vocab_size - 1))
    for chosen, make, step in (
        (small, _small, _MAX_ROWS),
        (drawn & ~small, _whole, max(1, _MAX_WEIGHTS // vocab_size)),
    ):
        for members in torch.split(chosen.nonzero()[:, 0], step):
            if not members.numel():
                continue
            every = members.numel() == len(values)
            picked = (one if every else one[members] for one in (values, top, temperature, top_k, top_p, min_p))
            masses, ids = make(*picked)
            yield members, masses, ids


def _small(
    values: Tensor, top: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Rows with a small top_k: only the candidates are looked at."""
    candidates, ids = order.leading(values, int(top_k.max()))
    log_ratio = weights.log_ratios(candidates, top, temperature)
    permutation = order.by_order(candidates)
    masses = weights.integer_weights(log_ratio).gather(1, permutation)
    masses.masked_fill_(torch.arange(masses.shape[1]) >= top_k[:, None], 0)
    running = masses.cumsum(1)
    target = weights.mass_target(running[:, -1], top_p)
    masses.masked_fill_(running - masses >= target[:, None], 0)
    masses = torch.empty_like(masses).scatter_(1, permutation, masses)
    weights.drop_below_min_p(masses, log_ratio, min_p)
    return masses, ids


def _whole(
    values: Tensor, top: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Rows of which every token may be drawn, and rows with a large top_k."""
    log_ratio = weights.log_ratios(values, top, temperature)
    masses = weights.integer_weights(log_ratio)
    limited = (top_k > 0) & (top_k < values.shape[1])
    if bool(limited.any()):
        target = torch.where(limited, top_k.to(torch.int64), torch.iinfo(torch.int64).max)
        weights.drop_after_prefix(values, log_ratio, masses, target, by_count=True)
    if bool((top_p < 1).any()):
        weights.drop_after_prefix(values, log_ratio, masses, weights.mass_target(masses.sum(-1), top_p), by_count=False)
    if bool((min_p > 0).any()):
        weights.drop_below_min_p(masses, log_ratio, min_p)
    return masses, None
