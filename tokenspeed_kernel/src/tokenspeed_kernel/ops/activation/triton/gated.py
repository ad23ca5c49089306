"""The clamped SwiGLU and the GELU gate in Triton: one program a row and block of columns."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["gelu_and_mul", "swiglu_clamped", "tanh"]

_MAX_BLOCK = 1024


@triton.jit
def tanh(x):
    # 2 * sigmoid(2x) - 1 saturates without overflow; written with exp of a negative number only.
    shrink = tl.exp(-2.0 * tl.abs(x))
    size = (1.0 - shrink) / (1.0 + shrink)
    return tl.where(x < 0, -size, size)


@triton.jit
def _gated_kernel(
    x_ptr, out_ptr, inner, limit, alpha, up_offset, x_row, gate_step, up_start, out_row, out_col,
    KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # Rows times strides can pass 2**31 elements.
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < inner
    x_ptr += row * x_row
    gate = tl.load(x_ptr + columns * gate_step, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + up_start + columns * gate_step, mask=mask, other=0.0).to(tl.float32)
    if KIND == "swiglu":
        # Comparisons, not min and max: a NaN must stay one.
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        result = gate / (1.0 + tl.exp(-alpha * gate)) * (up + up_offset)
    elif KIND == "gelu_tanh":
        result = 0.5 * gate * (1.0 + tanh(0.7978845608028654 * (gate + 0.044715 * gate * gate * gate))) * up
    else:
        result = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476)) * up
    tl.store(out_ptr + row * out_row + columns * out_col, result.to(out_ptr.dtype.element_ty), mask=mask)


def swiglu_clamped(
    gate_up: torch.Tensor,
    limit: float,
    *,
    alpha: float = 1.0,
    up_offset: float = 0.0,
    interleaved: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `tokenspeed_kernel.ops.activation.swiglu_clamped`."""
    return _launch(gate_up, out, "swiglu", float(limit), float(alpha), float(up_offset), interleaved)


def gelu_and_mul(gate_up: torch.Tensor, *, approximate: str = "none", out: torch.Tensor | None = None) -> torch.Tensor:
    """See `tokenspeed_kernel.ops.activation.gelu_and_mul`."""
    return _launch(gate_up, out, "gelu_tanh" if approximate == "tanh" else "gelu", 0.0, 0.0, 0.0, False)


def _launch(
    gate_up: torch.Tensor, out: torch.Tensor | None, kind: str, limit: float, alpha: float, offset: float, interleaved: bool
) -> torch.Tensor:
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
    row, column = rows.stride()
    step, up_start = (2 * column, column) if interleaved else (column, inner * column)
    _gated_kernel[(rows.shape[0], triton.cdiv(inner, block))](
        rows, target, inner, limit, alpha, offset, row, step, up_start, *target.stride(), KIND=kind, BLOCK=block, num_warps=4
    )
    return out if direct else out.copy_(target.view(shape))
