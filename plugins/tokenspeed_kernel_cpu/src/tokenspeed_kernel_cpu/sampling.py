"""Greedy choice of tokens from float32 logits; see `tokenspeed_kernel.ops.sampling` for the contract."""

from __future__ import annotations

import torch
from torch import get_num_threads

from tokenspeed_kernel_cpu import _kernels


def argmax(logits: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Id of the largest logit of each row, the lowest of equal ones."""
    rows, columns = logits.shape
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    _kernels.argmax(logits.data_ptr(), logits.stride(0), rows, columns, out.data_ptr(), out.stride(0), get_num_threads())
    return out
