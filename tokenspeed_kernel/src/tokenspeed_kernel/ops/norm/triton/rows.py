"""The norms in Triton over rows at two distances, as heads of tokens lie in a projection: a tile of rows in a program."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

__all__ = ["fused_add_gemma_rms_norm", "gated_rms_norm", "gemma_rms_norm", "layer_norm", "strided_rms_norm"]

# A row of more elements is read several times in blocks of this size, so that registers do not spill.
_MAX_BLOCK = 8192
_CONTIGUOUS = torch.contiguous_format
_TILE = 2048  # elements of a program where rows are short


@triton.jit
def _load_row(
    x_at, other_at, index, mask, x_col, other_col, total_type: tl.constexpr, ADD: tl.constexpr, GATE_FIRST: tl.constexpr
):  # fmt: skip
    """What is normalized: x, the sum with the residual as it is stored, or the gated x; float32."""
    x = tl.load(x_at + index * x_col, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(other_at + index * other_col, mask=mask, other=0.0).to(tl.float32)
        x = x.to(total_type).to(tl.float32)
    if GATE_FIRST:
        gate = tl.load(other_at + index * other_col, mask=mask, other=0.0).to(tl.float32)
        x = x * gate / (1.0 + tl.exp(-gate))
    return x


@triton.jit
def _norm_rows_kernel(
    x_ptr, other_ptr, weight_ptr, bias_ptr, out_ptr, total_ptr,
    num_rows, inner, groups, hidden, eps,
    x_outer, x_inner, x_col, other_outer, other_inner, other_col, weight_step, bias_step,
    out_outer, out_inner, out_col, total_outer, total_inner, total_col,
    CENTRE: tl.constexpr, OFFSET: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, GATE: tl.constexpr, GATE_FIRST: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, ONE_BLOCK: tl.constexpr,
):  # fmt: skip
    # Rows times strides can pass 2**31 elements, columns alone can too in a transposed tensor.
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    columns = tl.arange(0, BLOCK).to(tl.int64)[None, :]
    valid = (row < num_rows)[:, None]
    outer = (row // inner)[:, None]
    within = (row % inner)[:, None]
    shift = ((row % groups) * hidden)[:, None]  # where the group's part of weight and bias begins
    x_at = x_ptr + outer * x_outer + within * x_inner
    other_at = other_ptr + outer * other_outer + within * other_inner
    out_at = out_ptr + outer * out_outer + within * out_inner
    total_at = total_ptr + outer * total_outer + within * total_inner
    total_type = total_ptr.dtype.element_ty
    if ONE_BLOCK:
        mask = valid & (columns < hidden)
        x = _load_row(x_at, other_at, columns, mask, x_col, other_col, total_type, ADD, GATE_FIRST)
        if ADD:
            tl.store(total_at + columns * total_col, x.to(total_type), mask=mask)
        if CENTRE:
            x = tl.where(mask, x - (tl.sum(x, 1) / hidden)[:, None], 0.0)
        scale = 1.0 / tl.sqrt(tl.sum(x * x, 1) / hidden + eps)[:, None]
        weight = tl.load(weight_ptr + (shift + columns) * weight_step, mask=mask, other=0.0).to(tl.float32)
        if OFFSET:
            weight += 1.0
        result = x * scale * weight
        if BIAS:
            result += tl.load(bias_ptr + (shift + columns) * bias_step, mask=mask, other=0.0).to(tl.float32)
        if GATE and not GATE_FIRST:
            gate = tl.load(other_at + columns * other_col, mask=mask, other=0.0).to(tl.float32)
            result = result * gate / (1.0 + tl.exp(-gate))
        tl.store(out_at + columns * out_col, result.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        mean = tl.zeros([ROWS], tl.float32)[:, None]
        if CENTRE:
            sums = tl.zeros([ROWS, BLOCK], tl.float32)
            for start in range(0, hidden, BLOCK):
                index = start + columns
                sums += _load_row(
                    x_at, other_at, index, valid & (index < hidden), x_col, other_col, total_type, ADD, GATE_FIRST
                )  # fmt: skip
            mean = (tl.sum(sums, 1) / hidden)[:, None]
        squares = tl.zeros([ROWS, BLOCK], tl.float32)
        for start in range(0, hidden, BLOCK):
            index = start + columns
            mask = valid & (index < hidden)
            x = _load_row(x_at, other_at, index, mask, x_col, other_col, total_type, ADD, GATE_FIRST)
            x = tl.where(mask, x - mean, 0.0)
            squares += x * x
        scale = 1.0 / tl.sqrt(tl.sum(squares, 1) / hidden + eps)[:, None]
        # The last pass reads the inputs again, not what another lane stored: no fence is needed, and the outputs may
        # alias the inputs because each element is read before it is written.
        for start in range(0, hidden, BLOCK):
            index = start + columns
            mask = valid & (index < hidden)
            x = _load_row(x_at, other_at, index, mask, x_col, other_col, total_type, ADD, GATE_FIRST)
            if ADD:
                tl.store(total_at + index * total_col, x.to(total_type), mask=mask)
            weight = tl.load(weight_ptr + (shift + index) * weight_step, mask=mask, other=0.0).to(tl.float32)
            if OFFSET:
                weight += 1.0
            result = (x - mean) * scale * weight
            if BIAS:
                result += tl.load(bias_ptr + (shift + index) * bias_step, mask=mask, other=0.0).to(tl.float32)
            if GATE and not GATE_FIRST:
                gate = tl.load(other_at + index * other_col, mask=mask, other=0.0).to(tl.float32)
                result = result * gate / (1.0 + tl.exp(-gate))
            tl.store(out_at + index * out_col, result.to(out_ptr.dtype.element_ty), mask=mask)


def strided_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
    """RMS norm of rows without one common distance, such as the heads of a slice of a projection, without a copy."""
    _launch(x, None, weight, None, eps, out, None)


def gemma_rms_norm(
    x: torch.Tensor, weight: torch.Tensor, *, eps: float = 1e-6, out: torch.Tensor | None = None
) -> torch.Tensor:
    """See `tokenspeed_kernel.ops.norm.gemma_rms_norm`."""
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, None, weight, None, eps, out, None, offset=True)
    return out


def fused_add_gemma_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `tokenspeed_kernel.ops.norm.fused_add_gemma_rms_norm`."""
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if residual_out is None:
        residual_out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, residual, weight, None, eps, out, residual_out, offset=True)
    return out, residual_out


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    eps: float = 1e-5,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `tokenspeed_kernel.ops.norm.layer_norm`."""
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, None, weight, bias, eps, out, None, centre=True)
    return out


def gated_rms_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float = 1e-6,
    norm_before_gate: bool = True,
    group_size: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `tokenspeed_kernel.ops.norm.gated_rms_norm`."""
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    hidden = x.shape[-1] if group_size is None else group_size
    if x.numel() == 0:
        return out
    groups = x.shape[-1] // hidden

    def grouped(tensor: torch.Tensor) -> torch.Tensor:
        # A view, whatever the strides are.
        *steps, step = tensor.stride()
        return tensor.as_strided((*tensor.shape[:-1], groups, hidden), (*steps, hidden * step, step), tensor.storage_offset())

    parts = (x, gate, out) if groups == 1 else (grouped(x), grouped(gate), grouped(out))
    _launch(parts[0], parts[1], weight, None, eps, parts[2], None, groups=groups, gate=True, gate_first=not norm_before_gate)
    return out


def _two_distances(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Distances of the rows and of the groups of rows in the last but one dimension, or None where there are more."""
    if tensor.dim() == 1:
        return 0, 0
    lead, (*steps, inner_step, _) = tensor.shape[:-2], tensor.stride()
    outer_step = 0
    spread = 1
    for size, step in zip(reversed(lead), reversed(steps), strict=True):
        if size == 1:
            continue
        if spread == 1:
            outer_step = step
        elif step != outer_step * spread:
            return None
        spread *= size
    return outer_step, inner_step


def _launch(
    x: torch.Tensor,
    other: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    out: torch.Tensor,
    total: torch.Tensor | None,
    *,
    groups: int = 1,
    centre: bool = False,
    offset: bool = False,
    gate: bool = False,
    gate_first: bool = False,
) -> None:
    if x.numel() == 0:
        return
    hidden = x.shape[-1]
    inner = x.shape[-2] if x.dim() > 1 else 1
    num_rows = math.prod(x.shape[:-1])
    sources = [x, x if other is None else other]
    for place, source in enumerate(sources):
        if _two_distances(source) is None:
            sources[place] = source.contiguous()
    # An output whose rows lie at more than two distances is written through a contiguous copy.
    outs = [out] if total is None else [out, total]
    targets = [one if _two_distances(one) is not None else torch.empty_like(one, memory_format=_CONTIGUOUS) for one in outs]
    distances = [(*(_two_distances(one) or (0, 0)), one.stride(-1)) for one in (*sources, targets[0], targets[-1])]
    block = min(triton.next_power_of_2(hidden), _MAX_BLOCK)
    rows = max(1, min(_TILE // block, triton.next_power_of_2(num_rows)))
    _norm_rows_kernel[(triton.cdiv(num_rows, rows),)](
        *sources, weight, weight if bias is None else bias, targets[0], targets[-1], num_rows, inner, groups, hidden, eps,
        *distances[0], *distances[1], weight.stride(0), 0 if bias is None else bias.stride(0), *distances[2], *distances[3],
        CENTRE=centre, OFFSET=offset, BIAS=bias is not None, ADD=total is not None, GATE=gate, GATE_FIRST=gate_first,
        ROWS=rows, BLOCK=block, ONE_BLOCK=hidden <= block, num_warps=min(max(rows * block // 512, 1), 8),
    )  # fmt: skip
    for one, target in zip(outs, targets, strict=True):
        if target is not one:
            one.copy_(target)
