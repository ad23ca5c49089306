"""Cosines and sines of positions on several axes, in Triton: one program a token."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from tokenspeed_kernel.ops.rope.axes import axis_of_pairs

__all__ = ["multi_axis_cos_sin"]


@triton.jit
def _multi_axis_cos_sin_kernel(
    table_ptr, positions_ptr, axes_ptr, out_ptr, max_position, position_axis, position_token,
    ROTARY_DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    element = tl.arange(0, BLOCK)
    mask = element < ROTARY_DIM
    axis = tl.load(axes_ptr + element, mask=mask, other=0).to(tl.int64)
    row = tl.load(positions_ptr + axis * position_axis + token * position_token, mask=mask, other=0).to(tl.int64)
    inside = (row >= 0) & (row < max_position)
    value = tl.load(table_ptr + row * ROTARY_DIM + element, mask=mask & inside, other=float("nan"))
    tl.store(out_ptr + token * ROTARY_DIM + element, value, mask=mask)


def multi_axis_cos_sin(
    cos_sin_cache: torch.Tensor,
    positions: torch.Tensor,
    sections: tuple[int, ...],
    *,
    interleaved: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `tokenspeed_kernel.ops.rope.multi_axis_cos_sin`."""
    max_position, rotary_dim = cos_sin_cache.shape
    num_tokens = positions.shape[1]
    if out is None:
        out = torch.empty((num_tokens, rotary_dim), dtype=cos_sin_cache.dtype, device=cos_sin_cache.device)
    if num_tokens and rotary_dim:
        _multi_axis_cos_sin_kernel[(num_tokens,)](
            cos_sin_cache, positions, _axes(sections, interleaved, cos_sin_cache.device), out, max_position, *positions.stride(),
            ROTARY_DIM=rotary_dim, BLOCK=triton.next_power_of_2(rotary_dim), num_warps=1,
        )  # fmt: skip
    return out


@functools.lru_cache(maxsize=64)
def _axes(sections: tuple[int, ...], interleaved: bool, device: torch.device) -> torch.Tensor:
    """Axis of each element, on the device: made at the first call with these sections."""
    with torch.inference_mode(False):
        return torch.tensor(axis_of_pairs(sections, interleaved) * 2, dtype=torch.int32, device=device)
