"""Merging of the parts into which a row's keys were split: parts lie beside each other in one work space."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["merge_parts"]

_PARTS = 16
_SLICE = 128


@triton.jit(do_not_specialize=["splits", "q_len"])
def _merge_parts_kernel(
    parts_ptr, part_lse_ptr, out_ptr, lse_ptr, splits, q_len, out_req, out_token, out_head,
    HEADS: tl.constexpr, LATENT: tl.constexpr, SLICE: tl.constexpr, PARTS: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    dims = tl.program_id(1) * SLICE + tl.arange(0, SLICE)
    part = tl.arange(0, PARTS)
    part_lse_ptr += row * splits
    top = tl.full([PARTS], float("-inf"), dtype=tl.float32)
    for start in range(0, splits, PARTS):
        top = tl.maximum(top, tl.load(part_lse_ptr + start + part, mask=start + part < splits, other=float("-inf")))
    highest = tl.max(top, 0)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.zeros([PARTS], dtype=tl.float32)
    acc = tl.zeros([PARTS, SLICE], dtype=tl.float32)
    for start in range(0, splits, PARTS):
        weight = tl.exp(tl.load(part_lse_ptr + start + part, mask=start + part < splits, other=float("-inf")) - base)
        total += weight
        rows = parts_ptr + (row * splits + start + part)[:, None] * LATENT + dims[None, :]
        # A part without keys has weight 0; it is not read, because what lies there is of no step.
        acc += tl.load(rows, mask=(weight > 0.0)[:, None] & (dims < LATENT)[None, :], other=0.0) * weight[:, None]
    sum_of_weights = tl.sum(total, 0)
    empty = sum_of_weights == 0.0
    merged = tl.sum(acc, 0) / tl.where(empty, 1.0, sum_of_weights)
    token, head = row // HEADS, row % HEADS
    target = out_ptr + token // q_len * out_req + token % q_len * out_token + head * out_head + dims
    tl.store(target, merged.to(out_ptr.dtype.element_ty), mask=dims < LATENT)
    if LSE:
        # Every slice has the same.
        tl.store(lse_ptr + row, tl.where(empty, float("-inf"), base + tl.log(tl.where(empty, 1.0, sum_of_weights))))


def merge_parts(
    parts: torch.Tensor,
    part_lse: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    q_len: int,
    out_strides: tuple[int, ...],
) -> None:
    """Merge parts [num_rows, splits, latent_dim] by their LSEs [num_rows, splits] into the output and its LSE [num_rows].

    Args:
        parts: float32, contiguous; a row is (token, head).
        part_lse: float32, contiguous; -inf where a part saw no key.
        out: written; token t's row lies at (t // q_len, t % q_len, head) by ``out_strides``.
        lse: written where given.
        q_len: tokens that the first stride spans.
        out_strides: of (request, token, head).
    """
    num_rows, splits, latent_dim = parts.shape
    num_heads = out.shape[-2]
    width = min(_SLICE, triton.next_power_of_2(latent_dim))
    _merge_parts_kernel[(num_rows, triton.cdiv(latent_dim, width))](
        parts, part_lse, out, part_lse if lse is None else lse, splits, q_len, *out_strides,
        HEADS=num_heads, LATENT=latent_dim, SLICE=width, PARTS=_PARTS, LSE=lse is not None, num_warps=4,
    )  # fmt: skip
