"""Log-probabilities on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed_kernel.ops.sampling.contract import INVALID_TOKEN
from tokenspeed_kernel.ops.sampling.cpu import order

_MAX_LOGITS = 2**19  # at a time: a long prompt's log-softmax is never a copy of all its logits, and stays in the cache


def cpu_log_probs(logits: Tensor, token_ids: Tensor, top_n: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-softmax at the chosen ids, their ranks, and the first `top_n` of the total order; see the api."""
    step = max(1, _MAX_LOGITS // logits.shape[1])
    parts = [
        _chunk(logits[start : start + step].float(), token_ids[start : start + step].to(torch.int64), top_n)
        for start in range(0, max(len(logits), 1), step)
    ]
    chosen, ranks, top_ids, top_values = (torch.cat(column) for column in zip(*parts, strict=True))
    return chosen, ranks, top_ids, top_values


def _chunk(logits: Tensor, token_ids: Tensor, top_n: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_rows, vocab_size = logits.shape
    if not num_rows:
        empty = logits.new_empty(0)
        return empty, empty.int(), logits.new_empty(0, top_n).int(), logits.new_empty(0, top_n)
    # softmax over the last dimension does each row alone, in one order: the same bits whatever the batch.
    values = torch.log_softmax(logits, dim=-1)
    broken = ~logits.amax(-1).isfinite()
    ids = token_ids.clamp(0, vocab_size - 1)[:, None]
    mine = logits.gather(1, ids)
    # Rank: tokens that come before in the total order, and itself.
    larger = (logits > mine).sum(-1)
    equal = (logits == mine) & (torch.arange(vocab_size) <= ids)
    valid = (token_ids >= 0) & (token_ids < vocab_size) & ~broken
    chosen = values.gather(1, ids)[:, 0].masked_fill_(~valid, float("nan"))
    ranks = (larger + equal.sum(-1)).masked_fill_(~valid, 0).int()
    if not top_n:
        return chosen, ranks, logits.new_empty(num_rows, 0).int(), logits.new_empty(num_rows, 0)
    candidates, top_ids = order.leading(logits, top_n)
    top_ids = top_ids.gather(1, order.by_order(candidates))
    top_values = values.gather(1, top_ids).masked_fill_(broken[:, None], float("nan"))
    return chosen, ranks, top_ids.int().masked_fill_(broken[:, None], INVALID_TOKEN), top_values
