"""Rotary embedding in Triton: one program rotates some heads of one token, queries and keys in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["apply_rope"]

# Elements that a program handles at most: 8 a thread with 4 warps, twice for the two halves.
_MAX_PAIRS = 1024


@triton.jit
def _rotate_heads(
    x_ptr, out_ptr, cos, sin, head, num_heads, x_head, out_head,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    pair = tl.arange(0, BLOCK)
    if INTERLEAVED:
        first, second = 2 * pair, 2 * pair + 1
    else:
        first, second = pair, pair + HALF
    live = head < num_heads
    mask = live[:, None] & (pair < HALF)[None, :]
    a = tl.load(x_ptr + head[:, None] * x_head + first[None, :], mask=mask, other=0.0).to(tl.float32)
    b = tl.load(x_ptr + head[:, None] * x_head + second[None, :], mask=mask, other=0.0).to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    # Fused by name, because a compiler fuses either product: `kvcache.rope_write_kv` has to round alike.
    turned_a, turned_b = tl.fma(a, cos, -(b * sin)), tl.fma(b, cos, a * sin)
    tl.store(out_ptr + head[:, None] * out_head + first[None, :], turned_a.to(dtype), mask=mask)
    tl.store(out_ptr + head[:, None] * out_head + second[None, :], turned_b.to(dtype), mask=mask)
    if REST > 0:
        rest = 2 * HALF + tl.arange(0, REST)
        mask = live[:, None] & (rest < HEAD_DIM)[None, :]
        passed = tl.load(x_ptr + head[:, None] * x_head + rest[None, :], mask=mask)
        tl.store(out_ptr + head[:, None] * out_head + rest[None, :], passed, mask=mask)


@triton.jit
def _apply_rope_kernel(
    q_ptr, k_ptr, positions_ptr, table_ptr, q_out_ptr, k_out_ptr, max_position, num_heads, num_kv_heads,
    q_token, q_head, k_token, k_head, q_out_token, q_out_head, k_out_token, k_out_head, position_step,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr, HEADS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + token * position_step).to(tl.int64)
    # Nothing can be raised from here: a position without a row turns the token into NaN, which nobody overlooks.
    known = (position >= 0) & (position < max_position)
    pair = tl.arange(0, BLOCK)
    row = table_ptr + position * (2 * HALF)
    mask = pair < tl.where(known, HALF, 0)
    cos = tl.load(row + pair, mask=mask, other=float("nan"))[None, :]
    sin = tl.load(row + HALF + pair, mask=mask, other=float("nan"))[None, :]
    group = tl.program_id(1)
    head = group * HEADS + tl.arange(0, HEADS)
    num_query_groups = tl.cdiv(num_heads, HEADS)
    if group < num_query_groups:
        _rotate_heads(
            q_ptr + token * q_token, q_out_ptr + token * q_out_token, cos, sin, head, num_heads, q_head, q_out_head,
            HEAD_DIM, HALF, BLOCK, REST, INTERLEAVED,
        )  # fmt: skip
    else:
        head -= num_query_groups * HEADS
        _rotate_heads(
            k_ptr + token * k_token, k_out_ptr + token * k_out_token, cos, sin, head, num_kv_heads, k_head, k_out_head,
            HEAD_DIM, HALF, BLOCK, REST, INTERLEAVED,
        )  # fmt: skip


def apply_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    *,
    interleaved: bool = False,
    q_out: torch.Tensor | None = None,
    k_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `tokenspeed_kernel.ops.rope.apply_rope`."""
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    max_position, rotary_dim = cos_sin_cache.shape
    if q_out is None:
        q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if k_out is None:
        k_out = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    if num_tokens == 0:
        return q_out, k_out
    block = triton.next_power_of_2(rotary_dim // 2)
    heads = max(1, min(_MAX_PAIRS // block, triton.next_power_of_2(num_heads)))
    rest = head_dim - rotary_dim
    groups = triton.cdiv(num_heads, heads) + triton.cdiv(num_kv_heads, heads)
    _apply_rope_kernel[(num_tokens, groups)](
        q, k, positions, cos_sin_cache, q_out, k_out, max_position, num_heads, num_kv_heads,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1),
        q_out.stride(0), q_out.stride(1), k_out.stride(0), k_out.stride(1), positions.stride(0),
        HEAD_DIM=head_dim, HALF=rotary_dim // 2, BLOCK=block, REST=triton.next_power_of_2(rest) if rest else 0,
        HEADS=heads, INTERLEAVED=interleaved, num_warps=max(1, min(4, heads * block // 256)),
    )  # fmt: skip
    return q_out, k_out
