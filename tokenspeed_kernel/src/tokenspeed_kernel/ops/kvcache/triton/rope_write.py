"""Rotary embedding and cache write in one launch: programs of query heads, of key heads and of value heads."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tokenspeed_kernel.ops.kvcache.triton.fp8 import encode_e4m3

__all__ = ["launch", "load_angles", "load_pairs", "rope_write_kv", "rotate", "store_pairs"]

# Pairs of elements that a program rotates at most: 8 a thread with 4 warps.
_MAX_PAIRS = 1024


@triton.jit
def load_angles(table_ptr, position, max_position, HALF: tl.constexpr, BLOCK: tl.constexpr):
    """Cosines and sines [1, BLOCK] of a position.

    Nothing can be raised from here: a position without a row turns the token into NaN, which nobody overlooks.
    """
    known = (position >= 0) & (position < max_position)
    pair = tl.arange(0, BLOCK)
    row = table_ptr + position * (2 * HALF)
    mask = pair < tl.where(known, HALF, 0)
    cos = tl.load(row + pair, mask=mask, other=float("nan"))[None, :]
    sin = tl.load(row + HALF + pair, mask=mask, other=float("nan"))[None, :]
    return cos, sin


@triton.jit
def load_pairs(row_ptr, live, HALF: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr):
    """First and second elements [R, BLOCK] of the pairs of rows [R, 1] that are live, in float32."""
    if INTERLEAVED:  # read side by side, as they lie
        both = tl.arange(0, 2 * BLOCK)[None, :]
        x = tl.load(row_ptr + both, mask=live & (both < 2 * HALF), other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(x, (x.shape[0], BLOCK, 2)))
    else:
        pair = tl.arange(0, BLOCK)[None, :]
        mask = live & (pair < HALF)
        a = tl.load(row_ptr + pair, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(row_ptr + HALF + pair, mask=mask, other=0.0).to(tl.float32)
    return a, b


@triton.jit
def rotate(a, b, cos, sin, dtype: tl.constexpr):
    """Pairs turned by their angles, rounded as `rope.apply_rope` rounds them: fused by name, or a compiler fuses either product."""
    return tl.fma(a, cos, -(b * sin)).to(dtype), tl.fma(b, cos, a * sin).to(dtype)


@triton.jit
def store_pairs(row_ptr, a, b, live, HALF: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Write pairs to where `load_pairs` reads them; their dtype is the target's."""
    if INTERLEAVED:
        both = tl.arange(0, 2 * BLOCK)[None, :]
        x = tl.reshape(tl.join(a, b), (a.shape[0], 2 * BLOCK))
        tl.store(row_ptr + both, x, mask=live & (both < 2 * HALF))
    else:
        pair = tl.arange(0, BLOCK)[None, :]
        mask = live & (pair < HALF)
        tl.store(row_ptr + pair, a, mask=mask)
        tl.store(row_ptr + HALF + pair, b, mask=mask)


@triton.jit
def _kept(x, scale, inverse, SCALED: tl.constexpr, dtype: tl.constexpr):
    """What a cache stores of x: the same number, or its quotient in fp8."""
    if SCALED:
        # The quotient by its reciprocal and one correction, which rounds as a division does and costs a fourth of it. What is far
        # beyond fp8 needs no correction, and has none: infinity less infinity would be NaN.
        x = x.to(tl.float32)
        near = x * inverse
        quotient = tl.where(tl.abs(near) < 1024.0, tl.fma(tl.fma(-near, scale, x), inverse, near), near)
        if dtype == tl.uint8:
            kept = encode_e4m3(quotient).to(tl.uint8)
        else:
            kept = quotient.to(dtype)  # saturates on the devices that have it
    else:
        kept = x.to(dtype)
    return kept


@triton.jit
def _scale_of(scale_ptr, head, step, live, SCALED: tl.constexpr):
    """A head's scale, and its reciprocal."""
    scale = 1.0
    inverse = 1.0
    if SCALED:
        scale = tl.load(scale_ptr + head * step, mask=live, other=1.0)
        inverse = tl.minimum(tl.div_rn(1.0, scale), 3e38)  # finite, so that 0 stays 0
    return scale, inverse


@triton.jit(do_not_specialize=["max_position", "num_slots"])
def _rope_write_kv_kernel(
    q_ptr, k_ptr, v_ptr, positions_ptr, table_ptr, k_cache_ptr, v_cache_ptr, slots_ptr, k_scale_ptr, v_scale_ptr, q_out_ptr,
    max_position, num_slots, page_size, num_heads, num_kv_heads, q_token, q_head, k_token, k_head, v_token, v_head,
    q_out_token, q_out_head, k_page, k_offset, k_cache_head, v_page, v_offset, v_cache_head,
    position_step, slot_step, k_scale_step, v_scale_step,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, REST: tl.constexpr,
    HEADS: tl.constexpr, INTERLEAVED: tl.constexpr, SCALED: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    if CHAINED:
        # The programs of a launch start while the last of the one before it end, and wait here until its results are in memory.
        gdc_wait()
        gdc_launch_dependents()
    query_groups, kv_groups = tl.cdiv(num_heads, HEADS), tl.cdiv(num_kv_heads, HEADS)
    # Programs of one token follow each other, as its heads do in memory.
    num_groups = query_groups + 2 * kv_groups
    group = tl.program_id(0) % num_groups
    token = (tl.program_id(0) // num_groups).to(tl.int64)
    head = tl.arange(0, HEADS)[:, None]
    rest = 2 * HALF + tl.arange(0, max(REST, 1))[None, :]
    # What depends on nothing is asked for first: the angles have to wait for the position.
    if group < query_groups:
        position = tl.load(positions_ptr + token * position_step).to(tl.int64)
        head += group * HEADS
        live = head < num_heads
        row = q_ptr + token * q_token + head * q_head
        out_row = q_out_ptr + token * q_out_token + head * q_out_head
        a, b = load_pairs(row, live, HALF, BLOCK, INTERLEAVED)
        cos, sin = load_angles(table_ptr, position, max_position, HALF, BLOCK)
        a, b = rotate(a, b, cos, sin, q_out_ptr.dtype.element_ty)
        store_pairs(out_row, a, b, live, HALF, BLOCK, INTERLEAVED)
        if REST > 0:
            mask = live & (rest < HEAD_DIM)
            tl.store(out_row + rest, tl.load(row + rest, mask=mask), mask=mask)
    else:
        slot = tl.load(slots_ptr + token * slot_step)
        page = slot // page_size
        offset = slot - page * page_size  # 64 bits: a pool can pass 2**31 elements
        heads_here = tl.where((slot >= 0) & (slot < num_slots), num_kv_heads, 0)
        if group < query_groups + kv_groups:
            position = tl.load(positions_ptr + token * position_step).to(tl.int64)
            head += (group - query_groups) * HEADS
            live = head < heads_here
            row = k_ptr + token * k_token + head * k_head
            out_row = k_cache_ptr + page * k_page + offset * k_offset + head * k_cache_head
            a, b = load_pairs(row, live, HALF, BLOCK, INTERLEAVED)
            cos, sin = load_angles(table_ptr, position, max_position, HALF, BLOCK)
            # Rounded to the keys' own dtype, as if they had been written and read in between.
            a, b = rotate(a, b, cos, sin, k_ptr.dtype.element_ty)
            scale, inverse = _scale_of(k_scale_ptr, head, k_scale_step, live, SCALED)
            a = _kept(a, scale, inverse, SCALED, k_cache_ptr.dtype.element_ty)
            b = _kept(b, scale, inverse, SCALED, k_cache_ptr.dtype.element_ty)
            store_pairs(out_row, a, b, live, HALF, BLOCK, INTERLEAVED)
            if REST > 0:
                passed = tl.load(row + rest, mask=live & (rest < HEAD_DIM), other=0.0)
                passed = _kept(passed, scale, inverse, SCALED, k_cache_ptr.dtype.element_ty)
                tl.store(out_row + rest, passed, mask=live & (rest < HEAD_DIM))
        else:
            head += (group - query_groups - kv_groups) * HEADS
            live = head < heads_here
            dim = tl.arange(0, BLOCK_D)[None, :]
            mask = live & (dim < HEAD_DIM)
            x = tl.load(v_ptr + token * v_token + head * v_head + dim, mask=mask, other=0.0)
            scale, inverse = _scale_of(v_scale_ptr, head, v_scale_step, live, SCALED)
            kept = _kept(x, scale, inverse, SCALED, v_cache_ptr.dtype.element_ty)
            tl.store(v_cache_ptr + page * v_page + offset * v_offset + head * v_cache_head + dim, kept, mask=mask)


def rope_write_kv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    interleaved: bool = False,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    q_out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `tokenspeed_kernel.ops.kvcache.rope_write_kv`."""
    return launch(q, k, v, positions, cos_sin_cache, k_cache, v_cache, slot_mapping, interleaved, k_scale, v_scale, q_out, False)


@functools.cache
def _has_fp8(device: torch.device) -> bool:
    """Whether the device converts to e4m3 itself: NVIDIA's do from sm_89 on. (gfx942 has another fp8 of that name.)"""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)


def launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    interleaved: bool,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    q_out: torch.Tensor | None,
    chained: bool,
    max_pairs: int = _MAX_PAIRS,
    num_warps: int = 4,
) -> torch.Tensor:
    """Launch the kernel; chained, it overlaps the end of the launch before it (sm_90 and later)."""
    num_tokens, num_heads, head_dim = q.shape
    num_pages, page_size, num_kv_heads, _ = k_cache.shape
    max_position, rotary_dim = cos_sin_cache.shape
    if q_out is None:
        q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if num_tokens == 0:
        return q_out
    scaled = k_scale is not None
    if k_scale is None or v_scale is None:  # what is not used still needs an address
        k_scale, v_scale, k_scale_step, v_scale_step = cos_sin_cache, cos_sin_cache, 0, 0
    else:
        k_scale_step, v_scale_step = (one.stride(0) if one.dim() else 0 for one in (k_scale, v_scale))
        if not _has_fp8(k_cache.device):
            k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
    block = triton.next_power_of_2(rotary_dim // 2)
    heads = max(1, min(max_pairs // block, triton.next_power_of_2(num_heads)))
    rest = head_dim - rotary_dim
    groups = triton.cdiv(num_heads, heads) + 2 * triton.cdiv(num_kv_heads, heads)
    options = {"launch_pdl": True} if chained else {}
    _rope_write_kv_kernel[(num_tokens * groups,)](
        q, k, v, positions, cos_sin_cache, k_cache, v_cache, slot_mapping, k_scale, v_scale, q_out,
        max_position, num_pages * page_size, page_size, num_heads, num_kv_heads,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), q_out.stride(0), q_out.stride(1),
        *k_cache.stride()[:3], *v_cache.stride()[:3], positions.stride(0), slot_mapping.stride(0), k_scale_step, v_scale_step,
        HEAD_DIM=head_dim, HALF=rotary_dim // 2, BLOCK=block, BLOCK_D=triton.next_power_of_2(head_dim),
        REST=triton.next_power_of_2(rest) if rest else 0, HEADS=heads, INTERLEAVED=interleaved, SCALED=scaled, CHAINED=chained,
        num_warps=num_warps, **options,
    )  # fmt: skip
    return q_out
