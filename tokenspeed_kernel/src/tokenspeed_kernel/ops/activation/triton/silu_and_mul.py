"""SwiGLU in Triton: one program a row and block of columns."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["silu_and_mul"]

_MAX_BLOCK = 1024


@triton.jit
def _silu_and_mul_kernel(x_ptr, out_ptr, inner, x_row, x_col, out_row, out_col, BLOCK: tl.constexpr):
    # Rows times strides can pass 2**31 elements.
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < inner
    x_ptr += row * x_row
    gate = tl.load(x_ptr + columns * x_col, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + (columns + inner) * x_col, mask=mask, other=0.0).to(tl.float32)
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * out_row + columns * out_col, result.to(out_ptr.dtype.element_ty), mask=mask)


def silu_and_mul(gate_up: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """See `tokenspeed_kernel.ops.activation.silu_and_mul`."""
    inner = gate_up.shape[-1] // 2
    shape = (*gate_up.shape[:-1], inner)
    if out is None:
        out = torch.empty(shape, dtype=gate_up.dtype, device=gate_up.device)
    if out.numel() == 0:
        return out
    rows = gate_up.reshape(-1, 2 * inner)
    # Rows of an output that have no common stride are written through a contiguous copy.
    direct = out.dim() == 2 or out.is_contiguous()
    target = out.view(-1, inner) if out.is_contiguous() else out if direct else out.new_empty((rows.shape[0], inner))
    block = min(triton.next_power_of_2(inner), _MAX_BLOCK)
    _silu_and_mul_kernel[(rows.shape[0], triton.cdiv(inner, block))](
        rows, target, inner, *rows.stride(), *target.stride(), BLOCK=block, num_warps=4
    )
    return out if direct else out.copy_(target.view(shape))
