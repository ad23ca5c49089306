"""SwiGLU for float32 rows; see `tokenspeed_kernel.ops.activation` for the contract."""

from __future__ import annotations

import torch
from torch import get_num_threads

from tokenspeed_kernel_cpu import _kernels
from tokenspeed_kernel_cpu.layout import rows_of


def silu_and_mul(gate_up: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Gate one half of each row with the SiLU of the other."""
    shape = gate_up.shape
    inner = shape[-1] // 2
    target = out
    if target is None or not target.is_contiguous():
        target = gate_up.new_empty(*shape[:-1], inner)
    gate_up, rows, inner_rows, outer_stride, inner_stride = rows_of(gate_up)
    _kernels.silu_and_mul(
        gate_up.data_ptr(), inner_rows, outer_stride, inner_stride, target.data_ptr(), rows, inner, get_num_threads()
    )
    return target if out is None or out is target else out.copy_(target)
