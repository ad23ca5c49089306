"""RMS norm in Triton: one program a row, the row in registers where it fits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenspeed_kernel.ops.norm.triton.rows import strided_rms_norm

__all__ = ["fused_add_rms_norm", "rms_norm"]

# A row of more elements is read twice in blocks of this size, so that registers do not spill.
_MAX_BLOCK = 8192


@triton.jit
def _rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, residual_out_ptr,
    hidden, eps,
    x_row, x_col, residual_row, residual_col, weight_step, out_row, out_col, residual_out_row, residual_out_col,
    ADD: tl.constexpr, BLOCK: tl.constexpr, ONE_BLOCK: tl.constexpr,
):  # fmt: skip
    # Rows times strides can pass 2**31 elements, columns alone cannot for a contiguous row but can for a transposed one.
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK).to(tl.int64)
    x_ptr += row * x_row
    residual_ptr += row * residual_row
    out_ptr += row * out_row
    residual_out_ptr += row * residual_out_row
    if ONE_BLOCK:
        mask = columns < hidden
        x = tl.load(x_ptr + columns * x_col, mask=mask, other=0.0).to(tl.float32)
        if ADD:
            x += tl.load(residual_ptr + columns * residual_col, mask=mask, other=0.0).to(tl.float32)
            # The norm is of the sum as it is stored.
            rounded = x.to(residual_out_ptr.dtype.element_ty)
            tl.store(residual_out_ptr + columns * residual_out_col, rounded, mask=mask)
            x = rounded.to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / hidden + eps)
        weight = tl.load(weight_ptr + columns * weight_step, mask=mask, other=0.0).to(tl.float32)
        tl.store(out_ptr + columns * out_col, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=mask)
    else:
        squares = tl.zeros([BLOCK], dtype=tl.float32)
        for start in range(0, hidden, BLOCK):
            index = start + columns
            mask = index < hidden
            x = tl.load(x_ptr + index * x_col, mask=mask, other=0.0).to(tl.float32)
            if ADD:
                x += tl.load(residual_ptr + index * residual_col, mask=mask, other=0.0).to(tl.float32)
                x = x.to(residual_out_ptr.dtype.element_ty).to(tl.float32)
            squares += x * x
        scale = 1.0 / tl.sqrt(tl.sum(squares, axis=0) / hidden + eps)
        # The second pass reads the inputs again, not what another lane stored: no fence is needed, and the outputs may
        # alias the inputs because each element is read before it is written, in both passes.
        for start in range(0, hidden, BLOCK):
            index = start + columns
            mask = index < hidden
            x = tl.load(x_ptr + index * x_col, mask=mask, other=0.0).to(tl.float32)
            if ADD:
                x += tl.load(residual_ptr + index * residual_col, mask=mask, other=0.0).to(tl.float32)
                rounded = x.to(residual_out_ptr.dtype.element_ty)
                tl.store(residual_out_ptr + index * residual_out_col, rounded, mask=mask)
                x = rounded.to(tl.float32)
            weight = tl.load(weight_ptr + index * weight_step, mask=mask, other=0.0).to(tl.float32)
            tl.store(out_ptr + index * out_col, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=mask)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, *, eps: float = 1e-6, out: torch.Tensor | None = None
) -> torch.Tensor:
    """See `tokenspeed_kernel.ops.norm.rms_norm`."""
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.dim() > 2 and not (x.is_contiguous() and out.is_contiguous()):
        strided_rms_norm(x, weight, eps, out)  # heads of a projection, say, whose rows have no common distance
    else:
        _launch(x, None, weight, eps, out, None)
    return out


def fused_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `tokenspeed_kernel.ops.norm.fused_add_rms_norm`."""
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if residual_out is None:
        residual_out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, residual, weight, eps, out, residual_out)
    return out, residual_out




def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    residual_out: torch.Tensor | None,
) -> None:
    hidden = x.shape[-1]
    if x.numel() == 0:
        return
    x2 = x.reshape(-1, hidden)
    res2 = x2 if residual is None else residual.reshape(-1, hidden)
    # An output whose rows have no common stride is written through a contiguous copy.
    outs = [out] if residual_out is None else [out, residual_out]
    views = [one if one.dim() == 2 else one.view(-1, hidden) if one.is_contiguous() else None for one in outs]
    targets = [torch.empty_like(x2, memory_format=torch.contiguous_format) if one is None else one for one in views]
    out2, res_out2 = targets[0], targets[-1]
    block = min(triton.next_power_of_2(hidden), _MAX_BLOCK)
    _rms_norm_kernel[(x2.shape[0],)](
        x2, res2, weight, out2, res_out2, hidden, eps,
        *x2.stride(), *res2.stride(), weight.stride(0), *out2.stride(), *res_out2.stride(),
        ADD=residual is not None, BLOCK=block, ONE_BLOCK=hidden <= block,
        num_warps=min(max(block // 512, 1), 8),
    )  # fmt: skip
    for one, view, target in zip(outs, views, targets, strict=True):
        if view is None:
            one.copy_(target.view(one.shape))
