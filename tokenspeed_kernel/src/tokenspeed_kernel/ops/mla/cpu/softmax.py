"""Softmax over blocks of keys, one block after the other, with the state of all rows kept between them."""

from __future__ import annotations

import math

import torch

__all__ = ["RunningSoftmax", "compute_dtype"]


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype in which operands of ``dtype`` are computed: half-precision products are far slower on most host processors."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class RunningSoftmax:
    """Rows [batch, num_rows] whose keys come block by block.

    Attributes:
        acc: [batch, num_rows, value_dim], values weighted relative to ``top``.
        top: [batch, num_rows], largest logit so far; -inf where no key was seen.
        total: [batch, num_rows], sum of the weights.
    """

    def __init__(self, batch: int, num_rows: int, value_dim: int, dtype: torch.dtype) -> None:
        self.acc = torch.zeros((batch, num_rows, value_dim), dtype=dtype)
        self.top = torch.full((batch, num_rows), -math.inf, dtype=dtype)
        self.total = torch.zeros((batch, num_rows), dtype=dtype)

    def add(self, rows: slice, logits: torch.Tensor, values: torch.Tensor) -> None:
        """Take in logits [batch, rows, keys] (-inf for a key that a row does not see; overwritten) and values [batch, keys, V]."""
        acc, top, total = self.acc[:, rows], self.top[:, rows], self.total[:, rows]
        new_top = torch.maximum(top, logits.amax(-1))
        base = torch.where(new_top == -math.inf, 0.0, new_top)  # -inf - -inf is NaN
        shrink = torch.exp(top - base)
        weights = logits.sub_(base.unsqueeze(-1)).exp_()
        total.mul_(shrink).add_(weights.sum(-1))
        acc.mul_(shrink.unsqueeze(-1)).baddbmm_(weights, values)
        top.copy_(new_top)

    def finish(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (outputs [batch, num_rows, V], LSE [batch, num_rows]); 0 and -inf for a row without keys."""
        empty = self.total == 0
        outputs = self.acc.div_(torch.where(empty, 1.0, self.total).unsqueeze(-1))
        return outputs, torch.where(empty, -math.inf, self.top + torch.log(self.total))
