"""Device functions that the latent attention kernels share: one tile of keys, in two ways, and the end of the softmax.

`add_keys` holds whole rows: a tile is read once, and is key and value. `add_keys_by_slices` is for products without matrix units
(IEEE float32), where whole rows would not fit in registers: logits are summed over slices of the row, and one slice of the values
is accumulated.

Logits are in base 2: exp2 is one instruction. A row's maximum may be -inf (nothing seen yet); then 0 takes its place in
differences, because -inf - -inf is NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernel.ops.kvcache.triton.fp8 import decode_e4m3
from tokenspeed_kernel.ops.mla.packed import SCALE_BLOCK

__all__ = ["add_keys", "add_keys_by_slices", "finish_rows", "update_softmax"]

_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)
_SCALE_BLOCK = tl.constexpr(SCALE_BLOCK)


@triton.jit
def _load_latent(rows, dims, mask, valid, LATENT: tl.constexpr, dtype: tl.constexpr):
    """Latent elements `dims` of rows [BLOCK_N, 1] in dtype; the cache's own, or packed ones: a code times its block's scale."""
    if rows.dtype.element_ty == tl.uint8:
        codes = decode_e4m3(tl.load(rows + dims[None, :], mask=mask, other=0))
        scales = (rows + LATENT).to(tl.pointer_type(tl.float32))
        WIDTH: tl.constexpr = dims.shape[0]
        if WIDTH > _SCALE_BLOCK:  # whole blocks: each scale is read once
            BLOCKS: tl.constexpr = WIDTH // _SCALE_BLOCK
            block = tl.arange(0, BLOCKS)[None, :]
            scale = tl.load(scales + block, mask=valid[:, None] & (block < LATENT // _SCALE_BLOCK), other=0.0)
            codes = tl.reshape(codes, [codes.shape[0], BLOCKS, _SCALE_BLOCK]) * scale[:, :, None]
            latent = tl.reshape(codes, [codes.shape[0], WIDTH]).to(dtype)
        else:
            latent = (codes * tl.load(scales + (dims // _SCALE_BLOCK)[None, :], mask=mask, other=0.0)).to(dtype)
    else:
        latent = tl.load(rows + dims[None, :], mask=mask, other=0.0)
    return latent


@triton.jit
def _load_rope(rows, dims, mask, LATENT: tl.constexpr, dtype: tl.constexpr):
    """Rope elements `dims`."""
    if rows.dtype.element_ty == tl.uint8:
        first = (rows + LATENT + LATENT // _SCALE_BLOCK * 4).to(tl.pointer_type(tl.bfloat16))
        rope = tl.load(first + dims[None, :], mask=mask, other=0.0).to(dtype)
    else:
        rope = tl.load(rows + LATENT + dims[None, :], mask=mask, other=0.0)
    return rope


@triton.jit
def update_softmax(logits, seen, scale, rows_max, rows_sum):
    """Online softmax: (weights, factor of what was accumulated before, new maximum, new sum)."""
    logits = tl.where(seen, logits * (scale * _LOG2E), float("-inf"))
    new_max = tl.maximum(rows_max, tl.max(logits, 1))
    base = tl.where(new_max == float("-inf"), 0.0, new_max)
    shrink = tl.exp2(rows_max - base)
    weights = tl.exp2(logits - base[:, None])
    return weights, shrink, new_max, rows_sum * shrink + tl.sum(weights, 1)


@triton.jit
def add_keys(
    q_latent, q_rope, rows_max, rows_sum, acc, kv_ptr, kv_rows, valid, seen, scale,
    LATENT: tl.constexpr, ROPE: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Add a tile of keys at kv_ptr + kv_rows. Keys that are not valid are not read; `seen` says which rows see which keys."""
    dims, rope_dims = tl.arange(0, BLOCK_L), tl.arange(0, BLOCK_R)
    latent_mask, rope_mask = valid[:, None], valid[:, None]
    if LATENT != BLOCK_L:
        latent_mask = latent_mask & (dims < LATENT)[None, :]
    if ROPE != BLOCK_R:
        rope_mask = rope_mask & (rope_dims < ROPE)[None, :]
    rows = (kv_ptr + kv_rows)[:, None]
    latent = _load_latent(rows, dims, latent_mask, valid, LATENT, q_latent.dtype)
    rope = _load_rope(rows, rope_dims, rope_mask, LATENT, q_latent.dtype)
    logits = tl.dot(q_latent, tl.trans(latent), input_precision="ieee")
    logits = tl.dot(q_rope, tl.trans(rope), logits, input_precision="ieee")
    weights, shrink, rows_max, rows_sum = update_softmax(logits, seen, scale, rows_max, rows_sum)
    acc = tl.dot(weights.to(latent.dtype), latent, acc * shrink[:, None], input_precision="ieee")
    return rows_max, rows_sum, acc


@triton.jit
def add_keys_by_slices(
    q_rows, live, rows_max, rows_sum, acc, kv_ptr, kv_rows, valid, seen, scale, value_dims,
    LATENT: tl.constexpr, ROPE: tl.constexpr, CHUNK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Add a tile of keys; q_rows points at the queries, value_dims are the elements that are accumulated."""
    rows = (kv_ptr + kv_rows)[:, None]
    logits = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(0, LATENT + ROPE, CHUNK):
        dims = start + tl.arange(0, CHUNK)
        inside = (dims < LATENT + ROPE)[None, :]
        q = tl.load(q_rows[:, None] + dims[None, :], mask=live[:, None] & inside, other=0.0)
        if kv_ptr.dtype.element_ty == tl.uint8:
            k = _load_latent(rows, dims, valid[:, None] & (dims < LATENT)[None, :], valid, LATENT, q.dtype)
            rope_mask = valid[:, None] & inside & (dims >= LATENT)[None, :]
            k = tl.where((dims < LATENT)[None, :], k, _load_rope(rows, dims - LATENT, rope_mask, LATENT, q.dtype))
        else:
            k = tl.load(rows + dims[None, :], mask=valid[:, None] & inside, other=0.0)
        logits = tl.dot(q, tl.trans(k), logits, input_precision="ieee")
    weights, shrink, rows_max, rows_sum = update_softmax(logits, seen, scale, rows_max, rows_sum)
    value_mask = valid[:, None] & (value_dims < LATENT)[None, :]
    values = _load_latent(rows, value_dims, value_mask, valid, LATENT, q_rows.dtype.element_ty)
    acc = tl.dot(weights.to(values.dtype), values, acc * shrink[:, None], input_precision="ieee")
    return rows_max, rows_sum, acc


@triton.jit
def finish_rows(rows_max, rows_sum, acc):
    """Divide by the denominator: (outputs, LSE base e). A row without keys gives 0 and -inf."""
    empty = rows_sum == 0.0
    rows_sum = tl.where(empty, 1.0, rows_sum)
    lse = tl.where(empty, float("-inf"), (rows_max + tl.log2(rows_sum)) * _LN2)
    return acc / rows_sum[:, None], lse
